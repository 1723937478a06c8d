"""Structured output: answers that a grammar holds to letters are the reference's choice among those letters' tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from models_on_disk import SMALL, Written

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.structured import Vocabulary
from proof.oracle.trace import Request, Result, Trace

pytestmark = pytest.mark.engine
LETTERS = "aeioust"


def asked() -> Trace:
    """Four held to letters, one free; one prompt repeats itself, so that drafts are found."""
    rng = Random(12)
    words = tuple(rng.randrange(10, 250) for _ in range(90))
    free = Request("free", words[:50], 20)
    held = replace(free, name="held", letters=LETTERS)
    stops = replace(held, name="stops", prompt=words[:20], stop_token_ids=tuple(range(250, 512, 3)))
    return Trace(
        (
            free,
            held,
            stops,
            replace(held, name="repeats", prompt=words[:9] * 8),
            replace(held, name="long", prompt=words),
        )
    )


def free_of_the_grammar(todo: Trace) -> Trace:
    return Trace(tuple(replace(r, letters="") for r in todo.requests))


@pytest.fixture
def answers(run: Callable[..., list[Result]]) -> Callable[[Trace], Result]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}

    def go(todo: Trace) -> Result:
        more: dict[str, Any] = {"additional_config": {"kvq": {"W": 0}}, "speculative_config": drafts}
        return run([todo], kv_cache_dtype="squat2", block_size=32, max_num_batched_tokens=64, **more)[0]

    return go


def test_every_token_is_the_references(answers: Callable[[Trace], Result], written: Written) -> None:
    model = str(written(**SMALL))
    got, free = (answers(todo) for todo in (asked(), free_of_the_grammar(asked())))
    reference = ReplayModel(model, "squat2", 32, 3, 1e-3, W=0)
    verdict = judge(reference, [asked()], [got])
    assert not verdict.mismatches
    assert verdict.tokens == 5 * 20
    assert verdict.rejected > 0
    assert verdict.ties <= 0.05 * verdict.tokens
    allowed = reference.vocabulary.made_of(LETTERS)
    for name in ("held", "stops", "repeats", "long"):
        assert allowed[got.outputs[name][0]].all()
    # answers that no grammar holds are different, and are noticed
    assert any(m.startswith("held") for m in judge(reference, [asked()], [free]).mismatches)
    # a judge that knows of no grammar would not choose these tokens
    assert judge(reference, [free_of_the_grammar(asked())], [got]).mismatches


def test_tokens_of_some_letters(written: Written) -> None:
    """Pieces of these letters only, single bytes among them, and none of the special tokens."""
    from transformers import AutoTokenizer

    model = written(**SMALL)
    tokenizer, allowed = AutoTokenizer.from_pretrained(model), Vocabulary(str(model), 512).made_of("ab")
    texts = {tokenizer.decode([i]) for i in allowed.nonzero()[:, 0].tolist()}
    assert {"a", "b"} <= texts
    assert all(set(text) <= set("ab") for text in texts)


def test_stop_tokens_are_ruled_out(written: Written) -> None:
    """For the request that has them, and not for others with the same letters."""
    vocabulary = Vocabulary(str(written(**SMALL)), 512)
    free = Request("free", (10,), 1, letters="ab")
    stop = int(vocabulary.allowed(free).nonzero()[0])
    assert not vocabulary.allowed(replace(free, stop_token_ids=(stop,)))[stop]
    assert vocabulary.allowed(free)[stop]


def test_bytes_that_are_letters(tmp_path: Path) -> None:
    """Where bytes have tokens of their own, as in SentencePiece, these can spell a letter, too."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        models.WordLevel({"<unk>": 0, "a": 1, "<0x61>": 2, "<0x62>": 3, "\N{LOWER ONE EIGHTH BLOCK}a": 4}, "<unk>")
    )
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path)
    # the model may have more logits than the tokenizer tokens, or fewer
    assert Vocabulary(str(tmp_path), 8).made_of("a").tolist() == [False, True, True, *[False] * 5]
    assert Vocabulary(str(tmp_path), 3).made_of("a").tolist() == [False, True, True]

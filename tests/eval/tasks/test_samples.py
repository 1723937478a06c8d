"""Tasks as tokens: of the right length, with answers and sources where the text has them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import transformers
from models_on_disk import TINY, Written

from vllm_kvq.eval.tasks.samples import NEAR, Span, sequence
from vllm_kvq.eval.tasks.tasks import TASKS


@pytest.fixture(scope="module")
def tokenizer(written: Written) -> Any:
    return transformers.AutoTokenizer.from_pretrained(written(**TINY))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [700, 2000])
def test_they_fit(tokenizer: Any, task: str, context: int) -> None:
    made = sequence(tokenizer, task, context, context, 0, 0)
    # needles stand in whole sentences, a passage comes twice: these fill less of the context
    assert (0.8 if TASKS[task].name in ("needle", "needles", "repeat") else NEAR - 0.02) * context <= len(made.tokens)
    assert len(made.tokens) <= context
    assert bool(made.spans) is (task != "text")
    for span in made.spans:
        assert 0 < span.begin < span.end <= len(made.tokens)
        assert span.depth is None or 0 < span.depth <= 1


@pytest.mark.parametrize("task", [name for name in TASKS if name != "text"])
def test_spans_are_the_answers(tokenizer: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a span are those with characters of the answer; its depth leads to the source's token."""
    sample = TASKS[task].sample(random.Random(1), 3000)
    offsets = tokenizer(sample.text, return_offsets_mapping=True).offset_mapping
    from vllm_kvq.eval.tasks.samples import _tokenized

    made = _tokenized(tokenizer, sample, 10**6)
    assert len(made.spans) == len(sample.answers)
    for span, answer in zip(made.spans, sample.answers, strict=True):
        said = tokenizer.decode(made.tokens[span.begin : span.end])
        assert sample.text[answer.start : answer.end].strip() in said
        assert offsets[span.begin - 1][1] <= answer.start < offsets[span.begin][1]
        assert offsets[span.end - 1][0] < answer.end
        assert span.end == len(offsets) or answer.end <= offsets[span.end][0]
        assert span.steps == answer.steps
        if answer.source is None:
            assert span.depth is None
        else:
            assert span.depth is not None
            source = round(span.begin * (1 - span.depth))
            assert offsets[source][0] <= answer.source < offsets[source][1]


def test_they_follow_from_the_seed(tokenizer: Any) -> None:
    def make(number: int, seed: int) -> tuple[int, ...]:
        return sequence(tokenizer, "recall", 500, 500, number, seed).tokens

    assert make(0, 0) == make(0, 0)
    assert len({make(0, 0), make(1, 0), make(0, 1)}) == 3


def test_the_model_may_have_room_for_less(tokenizer: Any) -> None:
    made = sequence(tokenizer, "text", 512, 511, 3, 0)
    assert (made.context, made.number, len(made.tokens)) == (512, 3, 511)


def test_too_short_a_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no text as short as 8 tokens"):
        sequence(tokenizer, "needles", 8, 8, 0, 0)


def test_spans_are_plain_data() -> None:
    assert vars(Span(1, 2, 0.5, 1)) == {"begin": 1, "end": 2, "depth": 0.5, "steps": 1}

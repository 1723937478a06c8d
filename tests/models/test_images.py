"""Prompts with images: their tokens are keys and values like any other, shared among requests of the same image.

Under `lossless` tokens are plain vLLM's; those of every format are judged by the reference, whose images go through
Transformers' model.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import image_faults
import pytest
import torch
from engine_arguments import kvq
from lab import Lab
from test_works import ENGINE, LOSSLESS, PACKED, N

from proof.models.checkpoints import PROMPT_TOKENS
from proof.models.seeing import LLAVA, QWEN2_VL, Seeing
from proof.oracle.compare import compare_all
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.judge import judge
from proof.oracle.pictures import drawn
from proof.oracle.reference.lives import Life, Part
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.reference.whole import Whole
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict

pytestmark = pytest.mark.engine
both = pytest.mark.parametrize("seeing", [LLAVA, QWEN2_VL], ids=["LLaVA", "Qwen2-VL"])


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choice(PROMPT_TOKENS) for _ in range(count))


def traces(seeing: Seeing) -> list[Trace]:
    """Pictures 1 and 2 in prompts of one and several chunks, cut by a chunk's end and first in a prompt; again, with
    another picture, and before other words, so that hits end before, within and after a picture."""
    rng, of = random.Random(6), seeing.request
    before, between, after, other = (words(rng, count) for count in (40, 60, 50, 30))
    seen = [before, 1, between, after]
    return [
        Trace((of("cold", seen, 24), of("text", [words(rng, 70)], 24), of("short", [2, (9,)], 24))),
        Trace((of("again", seen, 24), of("other picture", [before, 2, between], 24, arrival=1))),
        Trace((of("within", [before, 1, other], 24), of("behind", [before, 1, between, other], 24))),
        Trace((of("two pictures", [before, 1, between, 2, other], 24), of("sinks", [2, (9,), other], 24))),
    ]


def run(seeing: Seeing, lab: Lab, todo: list[Trace], prepare: Any = None, **engine: Any) -> list[Result]:
    return lab.run(seeing.arch, todo, prepare=prepare, **{**ENGINE, **engine})


def judged(seeing: Seeing, lab: Lab, name: str, todo: list[Trace], got: list[Result], **options: Any) -> Verdict:
    error = 1e-2 if name == "qjl3" else 1e-3
    return judge(
        ReplayModel(str(lab.model(seeing.arch)), name, N, kernel_error=error, **{**PACKED, **options}), todo, got
    )


def cached(results: list[Result]) -> dict[str, int]:
    return {name: tokens for result in results for name, tokens in result.cached.items() if tokens}


@both
def test_lossless_equals_plain_vllm(seeing: Seeing, lab: Lab) -> None:
    todo = traces(seeing)
    expected, got = (run(seeing, lab, todo, **how) for how in ({"kv_cache_dtype": "auto"}, LOSSLESS))
    total = compare_all(todo, expected, got)
    assert not total.mismatches
    assert total.tokens == 9 * 24
    # what precedes the picture is found with any picture; the last 32 tokens are computed again
    hits = cached(got)
    assert hits.pop("behind") == 32 * ((40 + seeing.tokens + 60 + 30 - 1 - 32) // 32)
    assert hits == {"again": 160, "other picture": 32, "within": 96, "two pictures": 160, "sinks": 32}
    # the picture is seen
    assert got[1].outputs["again"] != got[1].outputs["other picture"]


FORMATS: dict[str, dict[str, int]] = {
    "squat2": {"S": 3},
    "innerq2": {"S": 4},
    "qjl3": {"S": 3},
    "polar4": {},
    "lossless": {"W": 32, "S": 4},
}
"""Three float32 tokens fit into one page of 32 packed ones: sinks on two pages would cost the hits of one page."""
BY_DEFAULT = (("LLaVA", "squat2"), ("LLaVA", "qjl3"), ("Qwen2-VL", "innerq2"), ("Qwen2-VL", "polar4"))
JUDGED = [
    pytest.param(seeing, name, id=f"{kind}-{name}", marks=() if (kind, name) in BY_DEFAULT else pytest.mark.wide)
    for kind, seeing in (("LLaVA", LLAVA), ("Qwen2-VL", QWEN2_VL))
    for name in FORMATS
]


@pytest.mark.parametrize(("seeing", "name"), JUDGED)
def test_every_token_is_the_references(seeing: Seeing, name: str, lab: Lab) -> None:
    todo, options = traces(seeing), FORMATS[name]
    got = run(seeing, lab, todo, **kvq(name, **{**PACKED, **options}))
    total = judged(seeing, lab, name, todo, got, **options)
    assert not total.mismatches
    assert total.tokens == 9 * 24
    assert total.ties <= 0.05 * total.tokens
    assert total.hits == 6


def squeezed(seeing: Seeing) -> list[Trace]:
    """Requests that grow until the pool is empty, with phrases that come again, which vLLM then drafts."""
    rng = random.Random(7)
    phrase = words(rng, 9)
    prompts = [[words(rng, i), 1 + i % 2, *[phrase] * (3 + i)] for i in range(5)]
    return [Trace(tuple(seeing.request(f"r{i}", parts, 110, arrival=i) for i, parts in enumerate(prompts)))]


@both
def test_preemption_and_drafts(seeing: Seeing, lab: Lab) -> None:
    todo = squeezed(seeing)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    got = run(seeing, lab, todo, **kvq("squat2", **PACKED), num_gpu_blocks_override=44, speculative_config=ngram)
    total = judged(seeing, lab, "squat2", todo, got, num_spec=3)
    assert not total.mismatches
    assert total.ties <= 0.05 * total.tokens
    assert total.preemptions > 0
    assert total.rejected > 0


@both
def test_the_reference_sees_what_transformers_sees(seeing: Seeing, lab: Lab) -> None:
    """A prompt with two pictures that chunks cut, and what follows it: logits are those of Transformers' own model,
    which puts the features and positions in their places itself."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    path, rng = str(lab.model(seeing.arch)), random.Random(8)
    asked = seeing.request("two", [words(rng, 9), 1, words(rng, 20), 2, words(rng, 5)], 8)
    tokens = [*asked.prompt, *words(rng, 8)]
    ids, network = torch.tensor([tokens]), AutoModelForImageTextToText.from_pretrained(path)
    pixels = AutoImageProcessor.from_pretrained(path)([drawn(p.seed) for p in asked.pictures], return_tensors="pt")
    kinds = {"mm_token_type_ids": (ids == seeing.token).int()} if "image_grid_thw" in pixels else {}
    with torch.no_grad():
        expected = network(input_ids=ids, **pixels, **kinds).logits[0]
    model = ReplayModel(path, "lossless", N)
    cuts = [0, 30, 100, len(asked.prompt), *range(len(asked.prompt) + 1, len(tokens) + 1)]
    chunks = [Part(a, tuple(tokens[a:b]), 0) for a, b in pairwise(cuts)]
    replay, life = model.request(asked), Life("two", asked, tokens, 0, [], len(asked.prompt), chunks)
    stepwise = torch.cat([replay.step(list(c.tokens), len(c.tokens)) for c in chunks])
    for got in (stepwise, Whole(model, [life]).logits(torch.arange(len(tokens)))):
        assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


def one_by_one(seeing: Seeing) -> list[Trace]:
    """Two pictures before the same word; one that a chunk cuts, and its prompt again."""
    cut = words(random.Random(9), 50)
    parts = {"one": [1, (9,)], "two": [2, (9,)], "cut": [cut, 1, (9,)], "again": [cut, 1, (9, 8, 7)]}
    return [Trace(tuple(seeing.request(name, parts[name], 4, arrival=3 * i) for i, name in enumerate(parts)))]


@both
@pytest.mark.wide
def test_v2_model_runner(seeing: Seeing, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNER, "1")
    todo = one_by_one(seeing)
    total = judged(seeing, lab, "squat2", todo, run(seeing, lab, todo, **kvq("squat2", **PACKED)))
    assert not total.mismatches
    assert (total.tokens, total.hits) == (16, 1)


FAULTS: dict[Any, Seeing] = {
    image_faults.shifted: LLAVA,
    image_faults.another: LLAVA,
    image_faults.begun_again: LLAVA,
    image_faults.not_in_keys: LLAVA,
    image_faults.all_in_a_row: QWEN2_VL,
    image_faults.counted_by_tokens: QWEN2_VL,
}
FIRST = (image_faults.another, image_faults.not_in_keys, image_faults.counted_by_tokens)
PLANTED = [pytest.param(f, id=f.__name__, marks=() if f in FIRST else pytest.mark.wide) for f in FAULTS]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: Any, lab: Lab) -> None:
    seeing = FAULTS[fault]
    todo = one_by_one(seeing)
    healthy, planted = (
        judged(seeing, lab, "squat2", todo, run(seeing, lab, todo, how, **kvq("squat2", **PACKED)))
        for how in (None, fault)
    )
    assert not healthy.mismatches
    assert planted.mismatches
    if fault is image_faults.not_in_keys:
        assert "hit a page that was never written" in planted.mismatches[0]

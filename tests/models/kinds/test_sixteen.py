"""A lossy format with layers in 16 bits: every token is the reference's, when prompts are new and when they hit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from lab import Lab

from proof.models import named
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle import judge as judging
from proof.oracle.judge import judge
from proof.oracle.reference.kinds import Sight
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Request, Trace

pytestmark = pytest.mark.engine
N = 64


def twice() -> list[Trace]:
    """Two prompts longer than a page, and both again together with one that begins like them."""
    rng = random.Random(4)
    shared, other = (tuple(rng.choice(PROMPT_TOKENS) for _ in range(n)) for n in (4 * N + 40, 70))
    first = (Request("cold", shared + other, 20), Request("short", other, 20, arrival=1))
    again = (Request("again", shared + other, 20), Request("nested", shared, 20), Request("late", other, 20, arrival=2))
    return [Trace(first), Trace(again)]


CASES: dict[str, tuple[str, dict[str, Any], dict[int, Sight]]] = {
    "a skipped layer": ("Llama", {"skip_layers": [0]}, {0: Sight()}),
    "windows": ("Gemma-3", {}, dict.fromkeys(range(5), Sight(window=48))),
    "sharing layers": ("Gemma-3n", {}, dict.fromkeys((1, 2, 4), Sight(window=48))),
}
"""The model, options, and the layers that stay in 16 bits, with their windows."""


@pytest.mark.parametrize("case", CASES)
def test_cold_and_again(case: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    name, options, exact = CASES[case]
    arch, todo = named(name), twice()
    engine = {"max_num_batched_tokens": 128, "max_model_len": 1024, "block_size": N}
    got = lab.run(arch, todo, kv_cache_dtype="squat2", additional_config={"kvq": {"W": 32, **options}}, **engine)
    reference = ReplayModel(str(lab.model(arch)), "squat2", N, W=32, **options)
    assert reference.exact == exact
    for i in (1, 2):  # the first time by itself, then with the repeated prompts
        verdict = judge(reference, todo[:i], got[:i])
        assert not verdict.mismatches
    # a prompt that came by itself comes again: its ties are counted with those of all
    assert verdict.ties <= 0.02 * verdict.tokens
    assert verdict.tokens == 100
    assert verdict.hits == 2
    # the control: a reference that packs all layers, or none, disagrees, whatever a few perturbed replays say
    for name in ("SOME", "MANY"):
        monkeypatch.setattr(judging, name, judging.BRIEF)
    for others in ({}, dict.fromkeys(range(len(reference.formats)), Sight())):
        wrong = ReplayModel(str(lab.model(arch)), "squat2", N, exact=others, W=32)
        assert judge(wrong, todo[:1], got[:1]).mismatches

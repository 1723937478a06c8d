"""Keys before RoPE, with models other than Llama: their own rotation is found, or they are refused."""

from __future__ import annotations

import pytest
from engine_arguments import kvq
from lab import Lab
from test_works import ENGINE, PACKED, TRACE, N

from proof.models import named
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel

pytestmark = pytest.mark.engine


def test_interleaved_pairs(lab: Lab) -> None:
    """Rotation of half the channels: in two chunks and after a hit."""
    arch = named("GLM-4")
    got = lab.run(arch, [TRACE], **kvq("squat2_pre", **PACKED), **ENGINE)[0]
    verdict = judge(ReplayModel(str(lab.model(arch)), "squat2_pre", N, **PACKED), [TRACE], [got])
    assert not verdict.mismatches
    assert verdict.tokens == sum(r.max_tokens for r in TRACE.requests)
    assert verdict.hits == 1
    assert verdict.ties <= 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OPT", "the model has no RoPE"),
        pytest.param("Command R7B", "the layers of this model may differ in their RoPE", marks=pytest.mark.wide),
        pytest.param("Phi-2", "vLLM runs this model through Transformers", marks=pytest.mark.wide),
    ],
)
def test_refused_before_weights_load(name: str, reason: str, lab: Lab) -> None:
    arch = named(name)
    engine = {"max_model_len": 256, "dtype": arch.dtype, **arch.engine}
    sentence = lab.refusal(lab.model(arch), **engine, kv_cache_dtype="squat2_pre")
    assert sentence is not None
    assert (
        f"--kv-cache-dtype squat2_pre: squat2_pre takes RoPE off keys before it stores them, and {reason}" in sentence
    )
    assert "use squat2" in sentence
    assert lab.refusal(lab.model(arch), **engine, kv_cache_dtype="squat2") is None

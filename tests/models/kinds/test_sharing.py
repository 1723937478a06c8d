"""Layers that share an earlier layer's KV cache (Gemma-3n), where the other tests of models do not reach: vLLM's V2
model runner, the GPU's path, compiled models, sharing layers in 16 bits, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lab import Lab
from test_works import ENGINE, LOSSLESS, TRACE, N

from proof.models import named
from proof.oracle.compare import compare
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Result, Trace

pytestmark = pytest.mark.engine
GEMMA = named("Gemma-3n")


@pytest.fixture(scope="module")
def plain(lab: Lab) -> Result:
    return lab.run(GEMMA, [TRACE], kv_cache_dtype="auto", **ENGINE)[0]


@pytest.mark.parametrize(
    "engine",
    [
        {"additional_config": {"kvq": {"W": 32, "S": 4, "skip_layers": [3]}}},
        {"additional_config": {"kvq": {"W": 32, "S": 4, "skip_layers": [0]}}},
        pytest.param({"enforce_eager": False}, marks=pytest.mark.wide),
    ],
    ids=["shared layer in 16 bits", "another one in 16 bits", "compiled"],
)
def test_lossless_equals_plain_vllm(engine: dict[str, Any], lab: Lab, plain: Result) -> None:
    got = lab.run(GEMMA, [TRACE], **{**LOSSLESS, **ENGINE, **engine})[0]
    verdict = compare(TRACE, plain, got)
    assert not verdict.mismatches
    assert verdict.hits == 1


@pytest.mark.wide
def test_v2_model_runner(lab: Lab, plain: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNER, "1")
    assert not compare(TRACE, plain, lab.run(GEMMA, [TRACE], **LOSSLESS, **ENGINE)[0]).mismatches


@pytest.mark.wide
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_gpu_path(runner: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are interpreted; every token is the reference's."""
    for name, value in (("VLLM_KVQ_GPU_PATH", "1"), ("VLLM_KVQ_KERNELS", "torch"), (RUNNER, str(int(runner == "V2")))):
        monkeypatch.setenv(name, value)
    todo = [Trace(tuple(replace(r, max_tokens=4) for r in TRACE.requests))]
    got = lab.run(GEMMA, todo, kv_cache_dtype="squat2", additional_config={"kvq": {"W": 32}}, **ENGINE)
    reference = ReplayModel(str(lab.model(GEMMA)), "squat2", N, kernel_error=1e-3, W=32)
    total = judge(reference, todo, got)
    assert not total.mismatches
    assert (total.tokens, total.hits) == (16, 1)


@pytest.mark.parametrize(
    ("name", "engine", "sentence"),
    [
        ("squat2", {"kv_sharing_fast_prefill": True}, "does not support --kv-sharing-fast-prefill; leave it out"),
        (
            "squat2",
            {"additional_config": {"kvq": {"skip_layers": [5]}}},
            "option 'skip_layers' names layer 5, which shares an earlier layer's KV cache",
        ),
        (
            "qjl3",
            {"additional_config": {"kvq": {"m": {"6": 512, "*": 256}}}},
            "option 'm' names layer 6, which no format serves",
        ),
    ],
)
def test_refusals(name: str, engine: dict[str, Any], sentence: str, lab: Lab) -> None:
    refused = lab.refusal(lab.model(GEMMA), kv_cache_dtype=name, **engine)
    assert refused is not None
    assert sentence in refused

"""The oracle: under `lossless`, in float32, every token equals plain vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
import traces
from engine_arguments import kvq

from proof.oracle.compare import compare, compare_all
from proof.oracle.verdict import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("runner")]
N = 32


CONFIGS: dict[str, dict[str, Any]] = {
    "packed only": kvq(W=0, S=0),
    "window and sinks": kvq(W=32, S=4),
    "small chunks": {**kvq(W=64, S=32), "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preemption": {**kvq(W=32, S=4), "num_gpu_blocks_override": 64},
    "speculation": {
        **kvq(W=32, S=4),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    },
    "compiled": {**kvq(W=32), "enforce_eager": False},
    "a layer in 16 bits": {**kvq(W=32, skip_layers=[1]), "block_size": 128},
    "no prefix cache": {**kvq(W=32, S=4), "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def verdict(request: pytest.FixtureRequest, runner: str, run: Any, plain: Any) -> tuple[str, Verdict]:
    todo = traces.all_traces(N)
    got = run(todo, **{"kv_cache_dtype": "lossless", "block_size": N, **CONFIGS[request.param]})
    total = compare_all(todo, plain[N], got)
    return request.param, total


def test_tokens_equal_plain_vllm(verdict: tuple[str, Verdict]) -> None:
    name, total = verdict
    assert not total.mismatches
    assert total.tokens > 1700
    # the scenario really happened
    assert total.hits > 0 or name in ("no prefix cache", "a layer in 16 bits")
    assert total.preemptions > 0 or name != "preemption"


def test_samples_and_aborts(run: Any, plain_samples: Any) -> None:
    trace = traces.samples_and_aborts(N)
    got = run([trace], kv_cache_dtype="lossless", block_size=N, **kvq(W=32, S=4))[0]
    total = compare(trace, plain_samples, got)
    assert not total.mismatches
    assert len(got.outputs["aborted"][0]) < 200 > len(got.outputs["aborted at once"][0])
    assert len({tuple(s) for s in got.outputs["three samples"]}) == 3


def test_large_blocks(run: Any, plain: Any) -> None:
    """vLLM's default block on the CPU, two blocks per chunk."""
    todo = traces.all_traces(N)
    got = run(todo, kv_cache_dtype="lossless", block_size=128, **kvq(W=96, S=32), max_num_batched_tokens=256)
    assert not compare_all(todo, plain[N], got).mismatches

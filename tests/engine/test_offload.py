"""Packed pages that were kept in the host's memory: prefix hits on them give the tokens that hits in the pool give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from offload import copied, copy_at_once

from proof.oracle.forked import EngineProcess
from proof.oracle.trace import Request, Trace

pytestmark = pytest.mark.engine
N = 32
ENGINE: dict[str, Any] = {"block_size": N, "max_num_batched_tokens": 96, "max_model_len": 512}


def connector(name: str = "SimpleCPUOffloadConnector") -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    extra = {"cpu_bytes_to_use": 1 << 28}
    how = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": how, "before": copy_at_once}


def todo(reset: bool) -> list[Trace]:
    """A long prompt; two that begin like it, after the pool has forgotten all; and one whose first blocks are in the
    pool again."""
    rng = random.Random(1)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(8, 512) for _ in range(count))

    shared, tail, end = words(160), words(40), words(5)
    return [
        Trace((Request("cold", shared + tail, 24),)),
        Trace((Request("other", words(9), 4),)),
        Trace((Request("begins alike", shared + end, 24), Request("same", shared + tail, 24, arrival=3)), reset=reset),
        Trace((Request("first blocks", shared[:70] + end, 4),), reset=reset),
        Trace((Request("the rest", shared + end, 24),)),
    ]


CASES: dict[str, dict[str, Any]] = {
    "lossless": {"W": 32, "S": 4},
    # a page that a request computes behind a hit is fitted to that request: here none does
    "squat2": {"recompute": 0},
    "innerq2": {"recompute": 0, "S": 8},  # its sinks are on two pages
}


@pytest.mark.parametrize("name", CASES)
def test_hits_from_the_host_give_the_same_tokens(name: str, model: Path) -> None:
    engine = {**ENGINE, "kv_cache_dtype": name, "additional_config": {"kvq": CASES[name]}}
    with EngineProcess(str(model), engine, {}) as process:
        expected = [process.run(trace) for trace in todo(reset=False)]
    with EngineProcess(str(model), {**engine, **connector()}, {}) as process:
        got, loaded = [], []
        for trace in todo(reset=True):
            got.append(process.run(trace))
            loaded.append(process.call(copied)["loaded"])
    for there, here in zip(expected, got, strict=True):
        assert here.outputs == there.outputs
    cached = {request: tokens for result in got for request, tokens in result.cached.items()}
    assert cached["begins alike"] == cached["the rest"] == expected[4].cached["the rest"] > 0
    assert cached["same"] == expected[2].cached["same"] > 0
    # blocks came from the host in the third trace, and the rest of a prefix in the last one
    assert 0 == loaded[0] < loaded[2]
    assert loaded[3] < loaded[4]


@pytest.mark.parametrize("name", ["ExampleConnector", "OffloadingConnector", "MultiConnector"])
def test_other_connectors_are_refused(name: str, bare: Any) -> None:
    from vllm_kvq.integration.validate import Refused, check

    how = connector(name)["kv_transfer_config"]
    sentence = r"does not support KV connectors; drop --kv-transfer-config .* or use SimpleCPUOffloadConnector on a GPU"
    with pytest.raises(Refused, match=sentence):
        check(bare(kv_cache_dtype="squat2", kv_transfer_config=how))


def test_there_is_nothing_to_offload_to_on_a_cpu(bare: Any) -> None:
    from vllm_kvq.integration.validate import Refused, check

    with pytest.raises(Refused, match=r"does not support KV connectors; .*: SimpleCPUOffloadConnector copies on GPUs"):
        check(bare(kv_cache_dtype="squat2", kv_transfer_config=connector()["kv_transfer_config"]))

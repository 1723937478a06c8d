"""No step writes into a page of the prefix cache: the oracle compares the bytes of everything its traces touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faults
import pytest
import traces

from proof.oracle.engines.forked import EngineProcess
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Trace

pytestmark = pytest.mark.engine
N, OPTIONS = 64, {"W": 64, "S": 8}
TODO = list(traces.prefixes(N))
ENGINE: dict[str, Any] = {
    "kv_cache_dtype": "squat2",
    "block_size": N,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 8,
    "additional_config": {"kvq": OPTIONS},
}


def watched(engine: Any) -> int:
    return len(engine.shared.known)


def run(engine: EngineProcess) -> list[Any]:
    return [engine.run(Trace(t.requests, reset=i == 0)) for i, t in enumerate(TODO)]


def test_pages_of_a_hit_stay_as_they_are(model: Path) -> None:
    with EngineProcess(str(model), ENGINE, {}) as engine:
        got = run(engine)
        verdict = judge(ReplayModel(str(model), "squat2", N, kernel_error=1e-3, **OPTIONS), TODO, got)
        assert not verdict.mismatches
        assert verdict.hits >= 3
        assert engine.call(watched) > 10
        assert not any(r.changed for r in got)
        # the control, twice
        engine.call(faults.rewritten_sinks)
        assert "was written while it was in the prefix cache" in str([r.changed for r in run(engine)])


def test_a_page_that_is_written_again_is_noticed(model: Path) -> None:
    with EngineProcess(str(model), ENGINE, {}, faults.rewritten_pages) as engine:
        got = run(engine)
    changed = [line for result in got for line in result.changed]
    assert changed
    verdict = judge(ReplayModel(str(model), "squat2", N, **OPTIONS), TODO, got)
    assert {*changed} <= {*verdict.mismatches}

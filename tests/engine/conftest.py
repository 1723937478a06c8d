"""Starts real engines, each in a separate process, and takes plain vLLM's answers as the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import traces
from configured import bare, configured
from models_on_disk import SMALL, Written
from one_thread import one_thread

from proof.oracle.engines.forked import EngineProcess
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.trace import Result, Trace

__all__ = ["bare", "configured", "one_thread"]

Run = Callable[..., list[Result]]


@pytest.fixture(scope="session")
def run(written: Written) -> Run:
    """run(traces, **engine arguments) -> results."""

    small = written(**SMALL)

    def go(todo: list[Trace], model_path: Path = small, **engine: Any) -> list[Result]:
        with EngineProcess(str(model_path), engine, {}) as process:
            return [process.run(trace) for trace in todo]

    return go


@pytest.fixture(scope="session")
def plain(run: Run) -> dict[int, list[Result]]:
    """Plain vLLM's answers for N = 32 (greedy tokens do not depend on block sizes)."""
    todo = traces.all_traces(32)
    return {32: run(todo, kv_cache_dtype="auto", block_size=32)}


@pytest.fixture(scope="session")
def plain_samples(run: Run) -> Result:
    return run([traces.samples_and_aborts(32)], kv_cache_dtype="auto", block_size=32)[0]


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.wide)])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """vLLM's model runner in the engines that a module starts. A step of V2 is interpreted here, which is slow:
    test_v2.py has few of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNNER, "1" if request.param == "V2" else "0")
        yield request.param

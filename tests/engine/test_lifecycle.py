"""What happens to a running engine's model or cache from outside: new weights, an emptied prefix cache, sleep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import traces
from models_on_disk import SMALL, Written

from proof.oracle.compare import compare_all
from proof.oracle.engines.forked import EngineProcess
from proof.oracle.trace import Result

pytestmark = pytest.mark.engine
ENGINES: dict[str, dict[str, Any]] = {
    # with sinks, and too few blocks for all requests of a trace at once
    "lossless": {"block_size": 32, "additional_config": {"kvq": {"W": 32, "S": 4}}, "pool": 1.3},
    "squat2": {"block_size": 64},
    "innerq2": {"block_size": 64},
    "qjl3": {"block_size": 64},
}
TRACES = traces.prefixes(64)


@pytest.fixture(scope="module")
def other(written: Written) -> Path:
    """The same shape, other weights."""
    return written(**SMALL, seed=1)


def answers(engine: EngineProcess, reset: bool = True) -> list[Result]:
    return [engine.run(replace(t, reset=reset and i == 0)) for i, t in enumerate(TRACES)]


def equal(expected: list[Result], got: list[Result]) -> bool:
    return not compare_all(TRACES, expected, got).mismatches


def reload(path: str, engine: Any) -> None:
    engine.engine.collective_rpc("reload_weights", kwargs={"weights_path": path})


def reset(engine: Any) -> bool:
    return bool(engine.engine.reset_prefix_cache())


def sleep(engine: Any) -> None:
    """vLLM's CPU worker keeps everything; the scheduler pauses and forgets what was cached."""
    engine.engine.sleep(level=1)
    engine.engine.wake_up()


# They keep more than pages for each request. So does `squat2`, which stays in the usual lane.
OTHERS = ("innerq2", "qjl3")


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.wide) if n in OTHERS else n for n in ENGINES])
def engine(request: pytest.FixtureRequest, runner: str, model: Path) -> Any:
    with EngineProcess(str(model), {"kv_cache_dtype": request.param, **ENGINES[request.param]}, {}) as process:
        yield request.param, process


def test_an_emptied_prefix_cache(engine: tuple[str, EngineProcess]) -> None:
    _, process = engine
    first = answers(process)
    assert sum(first[1].cached.values()) > 0
    assert process.call(reset)
    # cold again, and then hits as before
    again = answers(process, reset=False)
    assert again[0].cached["cold"] == 0
    assert [r.cached for r in again] == [r.cached for r in first]
    assert equal(first, again)


def test_sleep(engine: tuple[str, EngineProcess]) -> None:
    _, process = engine
    first = answers(process)
    process.call(sleep)
    assert equal(first, answers(process))


def test_new_weights(engine: tuple[str, EngineProcess], model: Path, other: Path) -> None:
    """There and back: the companions keep their cache, and the answers are those of an engine started that way."""
    name, process = engine
    first = answers(process)
    with EngineProcess(str(other), {"kv_cache_dtype": name, **ENGINES[name]}, {}) as fresh:
        expected = answers(fresh)
    assert not equal(first, expected)
    change: Callable[[Path], Any] = lambda path: process.call(functools.partial(reload, str(path)))  # noqa: E731
    change(other)
    assert equal(expected, answers(process))
    change(model)
    assert equal(first, answers(process))

"""Data that nobody may read is poisoned in the real pool, and not one token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import poison
import pytest

from proof.fuzz.attempt import Runner
from proof.fuzz.case import Setup
from proof.fuzz.draw import Drawer
from proof.oracle.engines.forked import EngineFailed, EngineProcess
from proof.oracle.judge import judge
from proof.oracle.trace import Request, Trace
from vllm_kvq.formats.table import suite

pytestmark = pytest.mark.engine
SCHEDULE: dict[str, Any] = {"budget": 100, "drafts": 3, "kernels": "auto"}
# pools that admit several requests and then run out; a sidecar is several blocks of a small page
SETUPS = {
    "lossless": Setup("lossless", 64, {"W": 32, "S": 32}, pool=1.6, **SCHEDULE),
    "squat2": Setup("squat2", 64, pool=2.0, **SCHEDULE),
    "qjl3": Setup("qjl3", 64, {"W": 64, "S": 20}, pool=3.0, **SCHEDULE),
    "polar4": Setup("polar4", 64, {"W": 64}, pool=3.0, **SCHEDULE),
    "innerq2": Setup("innerq2", 64, pool=1.6, **SCHEDULE),
    "squat4": Setup("squat4", 64, pool=2.0, **SCHEDULE),
    "kivi2": Setup("kivi2", 64, {"W": 32}, pool=2.0, **SCHEDULE),
    "kivi4": Setup("kivi4", 64, pool=2.0, **SCHEDULE),
    "polar3": Setup("polar3", 64, {"W": 64}, pool=3.0, **SCHEDULE),
    "kitty2": Setup("kitty2", 64, pool=2.0, **SCHEDULE),
    "klt2": Setup("klt2", 64, pool=2.0, **SCHEDULE),
}


def outputs(engine: EngineProcess, traces: list[Trace]) -> list[dict[str, list[list[int]]]]:
    return [engine.run(trace).outputs for trace in traces]


def told(engine: EngineProcess, traces: list[Trace]) -> Any:
    """The outputs, or the loud failure that a poisoned page header causes."""
    try:
        return outputs(engine, traces)
    except EngineFailed as error:
        return "failed" if "never packed" in str(error) else None


EVERY_TIME = ("qjl3",)
WIDE = [pytest.param(name, marks=pytest.mark.wide) for name in SETUPS if name not in EVERY_TIME]


def test_every_method_has_a_setup() -> None:
    assert {*suite("methods")} <= {*SETUPS}


@pytest.mark.parametrize("name", [*EVERY_TIME, *WIDE])
def test_nothing_unread_matters(name: str, runner: str, model: Path) -> None:
    setup = replace(SETUPS[name], runner=runner)
    drawer = Drawer(Random("poison"), setup)
    traces = [drawer.trace("drawn", reset=True)]
    words = [drawer.documents[0][: 300 + i] for i in range(2)] + [drawer.documents[1][: 66 + 11 * i] for i in range(9)]
    traces.append(Trace(tuple(Request(f"grows{i}", w, 100, arrival=i) for i, w in enumerate(words))))
    tried = Runner(str(model), setup)
    try:
        results, verdict = tried.run(traces)
        assert not verdict.mismatches
        # with preemption, hits, chunks and speculation
        assert min(verdict.preemptions, verdict.hits, verdict.rejected) > 0
        expected = [r.outputs for r in results]
        engine = tried.engine(name)
        # freed blocks are never read by their next owners: NaN patterns at every change of owner
        assert engine.call(poison.poison_freed) == 2
        assert outputs(engine, traces) == expected
        # the packed copies of sinks and window, other requests' blocks, free blocks
        engine.call(poison.poison_unread)
        assert outputs(engine, traces) == expected
        # the control: one slab more is noticed, or an engine check fails loudly
        engine.call(poison.stop_poison)
        engine.call(poison.poison_too_much)
        assert told(engine, traces) not in (expected, None)
    finally:
        tried.close()


def test_sinks_evicted_before_their_pages_are_survived(model: Path) -> None:
    """The pages are there, their sinks are gone: no hit, and the reference's tokens."""
    rng = Random("sinks")
    prompt = tuple(rng.randint(10, 500) for _ in range(500))
    ask = [Trace((Request(f"r{i}", (*prompt, 10 + i), 20),), reset=i == 0) for i in range(3)]
    runner = Runner(str(model), Setup("innerq2", 64, kernels="auto"))
    try:
        first, verdict = runner.run(ask[:2])
        assert not verdict.mismatches
        assert first[1].cached == {"r1": 384}
        assert runner.engine("innerq2").call(poison.evict_sinks) > 0
        again = runner.engine("innerq2").run(ask[2])
        assert again.cached == {"r2": 0}
        assert not judge(runner.reference, ask, [*first, again]).mismatches
    finally:
        runner.close()

"""An engine's process exits when the one that started it is gone, and never before."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

from vllm_kvq.integration.patches.once import own
from vllm_kvq.integration.patches.served import orphans

pytestmark = pytest.mark.engine
LOOK, GRACE = 0.05, 0.5


def engine(polite: bool, told: str) -> None:
    """Stands for vLLM's engine, at work or warming up, when it does not listen to SIGTERM."""
    if not polite:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    unfinished = Path(f"{told}.unfinished")
    unfinished.write_text(str(os.getpid()), encoding="utf-8")
    unfinished.rename(told)
    time.sleep(60)


def watched_engine(polite: bool, told: str) -> None:
    orphans.LOOK_SECONDS, orphans.GRACE_SECONDS = LOOK, GRACE
    orphans._vllms = lambda ours, name: engine
    orphans.run_engine_core(polite, told)


def server(method: str, polite: bool, told: str) -> None:
    """Starts an engine and waits for it, as vLLM's API server does."""
    multiprocessing.get_context(method).Process(target=watched_engine, args=(polite, told)).start()
    time.sleep(60)


Started = Callable[[str, bool], tuple[Any, psutil.Process]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    everyone: list[psutil.Process] = []

    def start(method: str, polite: bool) -> tuple[Any, psutil.Process]:
        told = tmp_path / "engine"
        # forked, so that it need not import vLLM again
        parent = multiprocessing.get_context("fork").Process(target=server, args=(method, polite, str(told)))
        parent.start()
        everyone.append(psutil.Process(parent.pid))
        deadline = time.monotonic() + 60
        while not told.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        everyone.append(psutil.Process(int(told.read_text())))
        return parent, everyone[-1]

    yield start
    for process in everyone:
        if process.is_running():
            process.kill()


@pytest.mark.parametrize("polite", [True, False], ids=["at work", "warming up"])
def test_it_ends_after_its_server(polite: bool, started: Started) -> None:
    parent, child = started("fork", polite)
    time.sleep(5 * LOOK)
    assert child.is_running()
    killed = time.monotonic()
    parent.kill()
    psutil.wait_procs([child], 30)
    assert not child.is_running()
    # it gets time for a clean exit, if it needs that
    assert polite or time.monotonic() - killed >= GRACE
    parent.join()


def test_it_stays_as_long_as_its_server(started: Started) -> None:
    parent, child = started("fork", True)
    time.sleep(20 * LOOK)
    assert child.is_running()
    assert child.status() != psutil.STATUS_ZOMBIE
    assert parent.is_alive()


@pytest.mark.wide
@pytest.mark.slow
def test_it_ends_where_it_was_spawned(started: Started) -> None:
    parent, child = started("spawn", True)
    parent.kill()
    psutil.wait_procs([child], 30)
    assert not child.is_running()
    parent.join()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """vLLM as it is before our formats are used; and whether this process is watched."""
    monkeypatch.setattr(EngineCoreProc, "run_engine_core", staticmethod(own(orphans.ENGINE)))
    monkeypatch.setattr(DPCoordinatorProc, "run_coordinator", staticmethod(own(orphans.COORDINATOR)))
    calls: list[bool] = []
    monkeypatch.setattr(orphans, "watch", lambda: calls.append(True))
    return calls


def test_only_our_formats_are_guarded(configured: Callable[..., Any], watched: list[bool]) -> None:
    engine, coordinator = EngineCoreProc.run_engine_core, DPCoordinatorProc.run_coordinator
    assert engine.__module__.startswith("vllm.")
    configured(kv_cache_dtype="auto")
    assert EngineCoreProc.run_engine_core is engine
    assert DPCoordinatorProc.run_coordinator is coordinator
    configured(kv_cache_dtype="squat2")
    assert EngineCoreProc.run_engine_core is orphans.run_engine_core
    assert DPCoordinatorProc.run_coordinator is orphans.run_coordinator
    # vLLM spawns its processes with them
    for guarded in (EngineCoreProc.run_engine_core, DPCoordinatorProc.run_coordinator):
        assert pickle.loads(pickle.dumps(guarded)) is guarded
    # the user's own process is not one of vLLM's
    assert not watched


@pytest.mark.parametrize(("name", "expected"), [("ApiServer_1", [True]), ("MainProcess", []), ("Process-1", [])])
def test_one_of_several_api_servers(
    name: str, expected: list[bool], watched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    orphans.guard(None)
    assert watched == expected


@pytest.mark.parametrize(
    ("name", "place"), [("run_engine_core", orphans.ENGINE), ("run_coordinator", orphans.COORDINATOR)]
)
def test_vllms_own_is_called_with_all_that_vllm_gives(
    name: str, place: str, watched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    theirs = {place: lambda *args, **kwargs: seen.append((args, kwargs))}
    monkeypatch.setattr(orphans, "_vllms", lambda ours, name: theirs[name])
    getattr(orphans, name)(1, dp_rank=2)
    assert seen == [((1,), {"dp_rank": 2})]
    assert watched == [True]

"""The fuzzer: a short run of it finds nothing, a planted fault is found and minimized, known cases pass."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults import stale_page

from proof.fuzz.attempt import Runner, Runners
from proof.fuzz.case import Case, Setup
from proof.fuzz.draw import Drawer
from proof.fuzz.main import default, main
from proof.fuzz.session import Finding, Session, minimal
from proof.models.copies import COPIES
from proof.oracle.engines.engine import packed_pools

pytestmark = pytest.mark.engine
CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats",
    [["squat2", "qjl3", "klt3", "lossless"], pytest.param(default(), marks=pytest.mark.wide)],
    ids=["a few", "all"],
)
def test_a_short_run_finds_nothing(formats: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format has an engine, even if fewer engines could judge as many requests."""
    for name in ("OMP_NUM_THREADS", "PYTHONWARNINGS"):  # the command sets them for its own process
        monkeypatch.setenv(name, os.environ.get(name, ""))
    report = tmp_path / "report.json"
    asked = ["--requests", str(2 * len(formats)), "--formats", ",".join(formats)]
    assert main(["--seed", "1", "--jobs", "1", "--counts", str(report), *asked]) == 0
    counts = json.loads(report.read_text())["counts"]
    assert counts["total"]["mismatches"] == 0
    assert {name for name, row in counts.items() if row["requests"] > 0} == {*formats, "total"}
    assert min(counts["total"][what] for what in ("hits", "rejected", "aborts")) > 0


@pytest.mark.weights
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_real_models(name: str, model: Path, weights: Callable[[str], Path]) -> None:
    """With the real tokenizer, whose tokens structured output and stop strings are about."""
    weights(COPIES[name])
    session = Session(str(model), seed=7, seconds=60, formats=["squat2"], jobs=1, requests=8, models=[name])
    session.run()
    assert session.finding is None
    assert session.counts["squat2"].models == {name: 1}


def stale(model: Path) -> Finding:
    """What a session says of a stale page; 16 requests over a small pool, in which blocks change hands."""
    session = Session(str(model), seed=23, seconds=60, formats=["squat2"], jobs=1, prepare=stale_page, episode=1)
    session.run()
    assert session.finding is not None
    return session.finding


def test_a_stale_page_is_found(model: Path) -> None:
    assert stale(model).messages


@pytest.mark.slow
@pytest.mark.wide
def test_a_stale_page_is_made_small(model: Path) -> None:
    finding = stale(model)
    small, messages = minimal(str(model), finding, 30, stale_page)
    assert messages
    assert small.size < finding.case.size
    # the printed case fails with the fault and only with it
    again = Case.from_json(json.loads(json.dumps(small.to_json())))
    for prepare, wrong in ((stale_page, True), (None, False)):
        runners = Runners(str(model), prepare)
        assert bool(runners.judge(again).mismatches) == wrong
        runners.close()


def memory(engine: Any) -> tuple[int, int, int]:
    """Bytes from one packed page to the next, of the whole pool, and those that the process holds."""
    pages = packed_pools(engine.engine)[0]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    stride = pages.stride(0) * pages.element_size()
    return stride, stride * len(pages), 1024 * int(status["VmRSS"].split()[0])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_pool_beyond_4_gib(kernels: str, model: Path) -> None:
    """Blocks below and beyond 2 and 4 GiB; only those that are used take memory."""
    setup = Setup("squat2", 64, pool=2.0, drafts=2, kernels=kernels, far=True)
    drawer = Drawer(Random(5), setup)
    runner = Runner(str(model), setup)
    try:
        results, verdict = runner.run([drawer.trace(f"t{i}", reset=i == 0) for i in range(2)])
        stride, pool, resident = runner.engine("squat2").call(memory)
    finally:
        runner.close()
    assert not verdict.mismatches
    assert verdict.tokens > 100
    used = {stride * page for result in results for step in result.steps for chunk in step for page in chunk.pages}
    for low, high in ((1, 1 << 31), (1 << 31, 1 << 32), (1 << 32, pool)):
        assert any(low <= at < high for at in used)
    assert pool > 5 << 30
    assert resident < 3 << 30


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_known_cases(path: Path, model: Path) -> None:
    runners = Runners(str(model))
    verdict = runners.judge(Case.from_json(json.loads(path.read_text(encoding="utf-8"))))
    runners.close()
    assert not verdict.mismatches

"""`python -m proof residues`: a few of all the lengths find nothing, and a fault at one residue in 64 is found."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from faults import RESIDUE, one_residue

from proof.fuzz.attempt import Runner
from proof.fuzz.case import Case
from proof.fuzz.listed import Judged
from proof.fuzz.main import COLUMNS
from proof.residues import main as residues
from proof.residues import sweep
from vllm_kvq.formats import get_format

pytestmark = pytest.mark.engine
N = 64
NOTHING = Judged({"lossless": dict.fromkeys(COLUMNS, 0)}, 2.0, 1, [])


def test_every_residue_and_cut_is_asked() -> None:
    setups = list(sweep.setups("lossless", N))
    assert {(s.drafts, s.budget) for s in setups} == {(d, b) for d in sweep.DRAFTS for b in (sweep.WHOLE, sweep.CUT)}
    case = sweep.case(setups[0], 1)
    assert case == Case.from_json(json.loads(json.dumps(case.to_json())))
    requests = {r.name: r for t in case.traces for r in t.requests}
    every = sweep.lengths(setups[0], 1)
    assert [*every] == [*range(1, max(every) + 1)]
    for name in ("lossless", "squat2"):  # without a window and with one
        most = max(sweep.lengths(next(sweep.setups(name, N)), 1))
        assert most == 2 * N + get_format(name).settings().W + sweep.MORE
    for length in every:
        one = requests[f"cold{length}"]
        assert len(one.prompt) == length
        # nothing reads the last token of an answer
        assert (length + one.max_tokens - 1) // N > length // N, "the answer passes the border"
        assert requests[f"hit{length}x0"].prompt == one.prompt
        for shared in range(1, length // N + 1):
            assert requests[f"hit{length}x{shared}"].prompt[: shared * N] == one.prompt[: shared * N]
    assert len({r.prompt[:1] for r in requests.values()}) > 100, "prompts share no page by chance"


@pytest.mark.parametrize("words", [["--stride", "-1"], ["--stride", "0"], ["--jobs", "0"]], ids=" ".join)
def test_a_sweep_of_nothing_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would find nothing."""
    monkeypatch.setattr(residues, "judge_listed", lambda cases, jobs: NOTHING)
    with pytest.raises(SystemExit) as stop:
        residues.main(words)
    assert stop.value.code == 2
    assert "--jobs and --stride must be positive" in capsys.readouterr().err


def test_a_page_has_the_command_that_was_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(residues, "judge_listed", lambda cases, jobs: NOTHING)
    words = ["--formats", "lossless", "--block-size", "32", "--stride", "41", "--runner", "V2"]
    assert residues.main([*words, "--report", str(tmp_path / "page.md")]) == 0
    assert f"    python -m proof residues {' '.join(words)}\n" in (tmp_path / "page.md").read_text()


def test_a_mismatch_is_said_and_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    case = sweep.case(next(sweep.setups("lossless", N)), 100)
    assert NOTHING.say() == 0
    assert replace(NOTHING, findings=[(case, ["cold1: another token"])]).say() == 1
    *_, said, how, line = capsys.readouterr().out.splitlines()
    assert said == "MISMATCH: cold1: another token"
    assert "python -m proof fuzz --replay FILE" in how
    assert Case.from_json(json.loads(line)) == case


@pytest.mark.slow
def test_some_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("OMP_NUM_THREADS", "PYTHONWARNINGS"):  # the command sets them for its own process
        monkeypatch.setenv(name, os.environ.get(name, ""))
    report = tmp_path / "residues.md"
    assert residues.main(["--formats", "lossless", "--stride", "41", "--report", str(report)]) == 0
    counts = dict(zip(*(line.split()[-13:] for line in capsys.readouterr().out.splitlines()[:2]), strict=True))
    assert int(counts["hits"]) > 10
    assert int(counts["rejected"]) > 50
    page = report.read_text()
    assert "40 tokens (of which every 41 were tried):" in page
    assert "--formats lossless --stride 41" in page


def test_a_fault_at_one_residue_is_found(model: Path) -> None:
    setup = next(sweep.setups("lossless", N))
    assert RESIDUE in {length % N for length in sweep.lengths(setup, 16)}
    runner = Runner(str(model), setup, one_residue)
    try:
        verdict = runner.judge(sweep.case(setup, 16).traces)
    finally:
        runner.close()
    assert verdict.mismatches

"""`python -m proof residues`: some lengths of all find nothing, and a fault at one residue in 64 is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faults import RESIDUE, one_residue

from proof.fuzz.attempt import Runner
from proof.fuzz.case import Case
from proof.residues import sweep
from vllm_kvq.formats import get_format

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
N = 64


def test_every_residue_and_cut_is_asked() -> None:
    setups = list(sweep.setups("lossless", N))
    assert {(s.drafts, s.budget) for s in setups} == {(d, b) for d in sweep.DRAFTS for b in (sweep.WHOLE, sweep.CUT)}
    case = sweep.case(setups[0], 1)
    assert case == Case.from_json(json.loads(json.dumps(case.to_json())))
    requests = {r.name: r for t in case.traces for r in t.requests}
    every = sweep.lengths(setups[0], 1)
    assert [*every] == [*range(1, max(every) + 1)]
    assert max(every) > 2 * N + get_format("lossless").settings().W
    for length in every:
        one = requests[f"cold{length}"]
        assert len(one.prompt) == length
        assert (length + one.max_tokens) // N > length // N, "the answer passes the border"
        assert requests[f"hit{length}x0"].prompt == one.prompt
        for shared in range(1, length // N + 1):
            assert requests[f"hit{length}x{shared}"].prompt[: shared * N] == one.prompt[: shared * N]
    assert len({r.prompt[:1] for r in requests.values()}) > 100, "prompts share no page by chance"


@pytest.mark.slow
def test_some_lengths(tmp_path: Path) -> None:
    report = tmp_path / "residues.md"
    command = [sys.executable, "-m", "proof", "residues", "--formats", "lossless", "--stride", "41"]
    done = subprocess.run([*command, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    counts = dict(zip(*(line.split()[-13:] for line in done.stdout.splitlines()[:2]), strict=True))
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

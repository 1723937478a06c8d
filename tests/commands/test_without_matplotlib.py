"""`plan` and `eval heads` without matplotlib: there is no plot, one line says why, and everything else is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvq import cli
from vllm_kvq.cli import plan
from vllm_kvq.cli.eval import heads
from vllm_kvq.cli.page.document import FILE
from vllm_kvq.cli.page.plots import NO_PLOT
from vllm_kvq.eval.heads.heads import HeadError
from vllm_kvq.integration.preview.budget import Row, Wanted

SAID = "no plot: pip install 'vllm-kvq[bench]' for matplotlib\n"


@pytest.fixture(autouse=True)
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("bf16", 16.0, 1 << 20, 8192.0, *[None] * 3), Row("kitty2", 3.0, 1 << 18, 2048.0, *[None] * 3)]
    found = plan.Outcome("model", Wanted(1024), None, rows, {}, {}, "a model", "", {"kitty2": [(256, 2.0), (512, 4.0)]})
    monkeypatch.setattr(plan, "wrong_models", lambda _: None)
    monkeypatch.setattr(plan, "planned", lambda *_: found)
    monkeypatch.setattr(plan, "be_quiet", lambda: None)
    assert cli.main(["plan", "model", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "kitty2" in printed.out
    assert printed.err == SAID
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["times_bf16_by_context"]["kitty2"]
    assert not (tmp_path / "plan.png").exists()


def test_eval_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {"squat2": [HeadError(0, 0, 0.125, 0.25, 0.375)]}
    monkeypatch.setattr(heads, "check_model", lambda *_: None)
    monkeypatch.setattr(heads.Model, "of", lambda *_: None)
    monkeypatch.setattr(heads, "captured_text", lambda *_: SimpleNamespace(windows=()))
    monkeypatch.setattr(heads, "measured", lambda *_: (errors, {}))
    assert cli.main(["eval", "heads", "model", "--formats", "squat2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "0.125" in printed.out
    assert printed.err == SAID
    assert NO_PLOT in (tmp_path / FILE).read_text(encoding="utf-8")
    assert not (tmp_path / heads.PLOT).exists()

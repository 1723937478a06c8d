"""What `scripts/audit.py` says of pip-audit's answers."""

from __future__ import annotations

import importlib.util
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
specification = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
assert specification is not None
audit = importlib.util.module_from_spec(specification)
assert specification.loader is not None
specification.loader.exec_module(audit)

CLEAN = {"name": "torch", "version": "2.13.0", "vulns": []}
FOUND = [
    {"id": "PYSEC-2026-1", "fix_versions": ["1.1", "2.0"], "aliases": [], "description": ""},
    {"id": "PYSEC-2026-2", "fix_versions": [], "aliases": [], "description": ""},
]
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


def test_all_that_is_installed_is_asked_about() -> None:
    packages = audit.installed()
    names = [package.partition("==")[0] for package in packages]
    assert {"torch", "numpy", "pytest", "apache-tvm-ffi"} <= {*names}
    assert "vllm-kvq" not in names
    assert f"torch=={metadata.version('torch').partition('+')[0]}" in packages
    assert not [package for package in packages if "+" in package]


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        ([CLEAN], []),
        (
            [{"name": "torch", "version": "2.13.0", "vulns": FOUND}],
            ["torch==2.13.0: PYSEC-2026-1, fixed in 1.1, 2.0", "torch==2.13.0: PYSEC-2026-2, not fixed yet"],
        ),
        ([SKIPPED], ["no answer about 1 of 1 packages (torch==2.13.0): connect to pypi.org, and run this again"]),
        ([], ["no answer about 1 of 1 packages (torch==2.13.0): connect to pypi.org, and run this again"]),
        (
            [{**CLEAN, "version": "2.12.0"}],
            ["no answer about 1 of 1 packages (torch==2.13.0): connect to pypi.org, and run this again"],
        ),
    ],
    ids=["clean", "vulnerable", "skipped", "not mentioned", "another version"],
)
def test_what_is_said(
    answers: list[dict[str, Any]], lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "installed", lambda: ["torch==2.13.0"])
    monkeypatch.setattr(audit, "ask", lambda packages: answers)
    assert audit.main() == (1 if lines else 0)
    assert capsys.readouterr().out.splitlines() == (lines or ["no known vulnerability; packages: 1"])


@pytest.mark.parametrize(
    ("installs", "printed", "sentence"),
    [(1, "", "can't install"), (0, "", "no way"), (0, "{}", "no way"), (0, '{"dependencies": [1]}', "")],
)
def test_a_failure_is_one_sentence(installs: int, printed: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        status = installs if "pip" in command else 1
        return subprocess.CompletedProcess(command, status, printed, "no way\n")

    monkeypatch.setattr(audit.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(audit.subprocess, "run", run)
    if not sentence:
        assert audit.ask(["torch==2.13.0"]) == [1]
        return
    with pytest.raises(SystemExit, match=sentence) as failure:
        audit.ask(["torch==2.13.0"])
    assert "\n" not in str(failure.value)


def test_a_few_of_many_are_named() -> None:
    packages = [f"p{i}==1" for i in range(9)]
    (line,) = audit.verdict(packages, [{"name": "P0", "version": "1", "vulns": []}])
    assert line.startswith("no answer about 8 of 9 packages (p1==1, p2==1, p3==1, p4==1, p5==1, ...): ")

"""The entry point `python -m proof`, its commands, `make fuzz` and `make soak`, and what documents say."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import proof
from proof.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
DOCUMENTED = sorted(
    {line for page in DOCUMENTS for line in re.findall(r"python -m (proof \w[^`\n#]*)", page.read_text())}
)
"""What follows `python -m` in a document, up to the end of its line."""
NO_OPTIONS_OF_OURS = ("-m", "--")
"""From here on a line names another command."""
MADE = sorted({x for page in DOCUMENTS for x in re.findall(r"(?:^    |`)make (\w+)", page.read_text(), re.MULTILINE)})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS[name][0])
    assert callable(module.main)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m proof {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_is_status_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--no-such-option"])
    assert stop.value.code == 2
    assert f"python -m proof {name}: error: " in capsys.readouterr().err


def test_a_file_without_a_case_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "case").write_text("{}")
    for name in ("case", "missing"):
        with pytest.raises(SystemExit) as stop:
            main(["fuzz", "--replay", str(tmp_path / name)])
        assert stop.value.code == 2
        assert "holds no case" in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().err == printed
    assert main(["fuz"]) == 2
    assert "there is no command 'fuz'" in capsys.readouterr().err


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "proof", "fuz"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: python -m proof COMMAND" in done.stderr


def test_the_picture_shows_every_folder() -> None:
    folders = {path.parent.name for path in (ROOT / "proof").glob("*/__init__.py")}
    assert set(re.findall(r"^    (\w+)/  ", proof.__doc__ or "", re.MULTILINE)) == folders
    for folder in folders:
        assert (importlib.import_module(f"proof.{folder}").__doc__ or "").strip(), f"proof/{folder} says nothing"


@pytest.mark.parametrize("target", ["fuzz", "soak"])
@pytest.mark.parametrize(
    ("variables", "options"),
    [([], "--seed 0 --minutes 10"), (["SEED=3", "MINUTES=2"], "--seed 3 --minutes 2")],
    ids=["defaults", "given"],
)
def test_make(target: str, variables: list[str], options: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", target, *variables]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] == f".venv/bin/python -m proof {target} {options}"


@pytest.mark.parametrize("line", DOCUMENTED)
def test_documented_commands_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, name, *words = shlex.split(line.strip().rstrip(");,."))
    assert name in COMMANDS
    with pytest.raises(SystemExit):
        main([name, "--help"])
    known = set(re.findall(r"--?\w[\w-]*", capsys.readouterr().out))
    for word in words:
        if word in NO_OPTIONS_OF_OURS:
            break
        assert not word.startswith("-") or word in known


def test_documented_targets_exist() -> None:
    rules = re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"fuzz", "soak", "test"} <= set(MADE) <= {target for rule in rules for target in rule.split()}

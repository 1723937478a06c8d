"""docs/papers.md: every command of the page is run, with less data than a reader would use."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from one_thread import one_thread

from vllm_kvq.cli.eval import error as error_table
from vllm_kvq.cli.eval import heads as heads_command
from vllm_kvq.eval.choice import choices

__all__ = ["one_thread"]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ERROR, HEADS = ["vllm-kvq", "eval", "error"], ["vllm-kvq", "eval", "heads", "demo"]
COMMANDS = [shlex.split(text) for text in dict.fromkeys(re.findall(r"`(vllm-kvq [^`]*)`", PAGE)) if "MODEL" not in text]
ERRORS = [command[3:] for command in COMMANDS if command[:3] == ERROR]
ON_A_MODEL = [command[4:] for command in COMMANDS if command[:4] == HEADS]


def test_all_are_of_a_kind_that_is_run() -> None:
    assert len(ERRORS) + len(ON_A_MODEL) == len(COMMANDS) > 10
    assert all(command[0] == "--formats" and len(command) == 2 for command in (*ERRORS, *ON_A_MODEL))


@pytest.mark.parametrize("command", ERRORS, ids=lambda command: command[1])
def test_errors(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert error_table.main([*command, "--seeds", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    for choice in choices(command[1]):
        cells = next(row for row in rows if row.startswith(f"{choice.label} ")).split()[2:]
        # zeros in place of keys have an error of 1
        assert all(0 < float(cell) < 1 for cell in cells)


def figures(command: list[str]) -> str:
    """The last cell of the command's row, which is the command itself where the page has no figures for it."""
    row = next(line for line in PAGE.splitlines() if f"eval error --formats {command[1]}`" in line)
    return row.strip(" |").rpartition("|")[2]


@pytest.mark.wide
@pytest.mark.parametrize("command", [c for c in ERRORS if "`" not in figures(c)], ids=lambda command: command[1])
def test_figures(command: list[str]) -> None:
    """As the command prints them; the last place may differ between machines."""
    for pair, choice in zip(figures(command).split(";"), choices(command[1]), strict=True):
        for cell, rope in zip(pair.split(","), (False, True), strict=True):
            error = error_table.error(choice.format, dict(choice.options), 128, rope)
            assert float(cell) == pytest.approx(error, abs=0.0015)


@pytest.mark.wide
@pytest.mark.engine
def test_on_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    """All in one run of the model, which takes longer than the measurements."""
    every = list(dict.fromkeys(choice.label for command in ON_A_MODEL for choice in choices(command[1])))
    assert heads_command.main(["demo", "--context", "512", "--formats", ",".join(every)]) == 0
    printed = capsys.readouterr().out
    assert all(label in printed for label in every)


def test_modules_and_functions_that_it_names_exist() -> None:
    files = [*(ROOT / "vllm_kvq" / "formats").rglob("*.py"), *(ROOT / "tests" / "formats").rglob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    for path in re.findall(r"`((?:vllm_kvq|csrc|triton_kernels|tests)/[^`]*)`", PAGE):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(?:\w+\.)?(_?[a-z]\w*_\w+)`", " ".join(re.findall(r"^\| .* \| .*`.*$", PAGE, re.M))):
        assert re.search(rf"\bdef {name}\b|\"{name}\"", sources), name

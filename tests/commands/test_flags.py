"""Every flag of `vllm-kvq` has one form and one meaning, whichever command takes it."""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_kvq import cli
from vllm_kvq.cli import arguments
from vllm_kvq.console import FORMERLY

LISTS = {"--formats", "--tasks", "--regimes", "--context", "--batch", "--head-size", "--block-size", "--lm-eval"}
"""What may be a list, everywhere or in some of the commands."""
KEPT = {"--model", "--folder"}
"""Words with a meaning of their own in instruments: `demo` has a model unless one is named, and its other arguments are
vLLM's; `clients` goes on from what its folder holds."""


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for command in cli.COMMANDS:
        yield " ".join(command.words), importlib.import_module(command.module).parser()


PARSERS = dict(parsers())
OPTIONS = [
    (name, flag, action)
    for name, parser in PARSERS.items()
    for action in parser._actions
    for flag in action.option_strings
    if flag not in ("-h", "--help")
]


@pytest.mark.parametrize("name", PARSERS)
def test_no_flag_is_guessed_from_its_beginning(name: str) -> None:
    assert not PARSERS[name].allow_abbrev
    if name == "check":  # its arguments are read by vLLM's parser
        return
    with pytest.raises(SystemExit) as exited:
        cli.main([*name.split(), "--js", "--hel"])
    assert exited.value.code == 2


@pytest.mark.parametrize("flag", sorted({flag for _, flag, _ in OPTIONS}))
def test_one_form_and_one_meaning(flag: str) -> None:
    """The metavar may be a list's in one command and a single value's in another."""
    same = [(name, action) for name, found, action in OPTIONS if found == flag]
    metavars = {str(action.metavar).removesuffix(",...") for _, action in same}
    meanings = {" ".join((action.help or "").replace(",", "").split()[:2]) for _, action in same}
    assert len(metavars) == 1, same
    assert len(meanings) == 1, same


def test_the_control_notices_another_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    other = argparse.ArgumentParser().add_argument("--seed", metavar="SEED", help="another thing")
    monkeypatch.setitem(globals(), "OPTIONS", [*OPTIONS, ("other", "--seed", other)])
    with pytest.raises(AssertionError):
        test_one_form_and_one_meaning("--seed")


def test_words_that_flags_had() -> None:
    """`plan` keeps one: it counts requests that a machine would hold, and starts none."""
    assert {(name, flag) for name, flag, _ in OPTIONS if flag in FORMERLY} == {("plan", "--concurrency")}


@pytest.mark.parametrize(("name", "flag", "action"), OPTIONS, ids=[f"{name} {flag}" for name, flag, _ in OPTIONS])
def test_a_list_is_written_with_commas_and_a_default_is_said(name: str, flag: str, action: argparse.Action) -> None:
    assert action.nargs in (None, 0)
    metavar = str(action.metavar)
    assert (flag in LISTS) or not metavar.endswith(",...")
    assert metavar.endswith(",...") or not (flag.endswith("s") and isinstance(action.default, (list, tuple)))
    if action.nargs == 0:
        return
    parser = PARSERS[name]
    formatter = parser._get_formatter()
    formatter.add_argument(action)
    said = " ".join(formatter.format_help().split())
    assert "(default: " in said or "; default: " in said
    if action.default is not None:
        assert f"default: {action.default}" in said


def test_every_list_is_one() -> None:
    found = {flag for _, flag, action in OPTIONS if str(action.metavar).endswith(",...")}
    assert found == LISTS


@pytest.mark.parametrize(
    "name", [name for name in PARSERS if name.startswith(("bench decode", "bench serve", "eval "))]
)
def test_a_model_has_no_flag(name: str) -> None:
    models = [action for action in PARSERS[name]._actions if action.dest == "model"]
    assert all(not action.option_strings for action in models)


def test_a_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert arguments.folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    for bad in ("file", "file/below"):
        with pytest.raises(argparse.ArgumentTypeError, match="name a"):
            arguments.folder(str(tmp_path / bad))


@pytest.mark.parametrize(("text", "sentence"), [("x", "'x' is not a whole number"), ("0", "0 is below 1"), ("", "''")])
def test_whole_numbers(text: str, sentence: str) -> None:
    assert arguments.whole_numbers("1,2048") == [1, 2048]
    with pytest.raises(argparse.ArgumentTypeError, match=sentence):
        arguments.whole_numbers(f"1,{text}")


ROOT = Path(__file__).parents[2]


def flags_of_instruments() -> Iterator[tuple[str, dict[str, str]]]:
    """Each flag of `python -m proof`'s commands, with the arguments that declare it, as they are written."""
    for path in (ROOT / "proof").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                flag = ast.literal_eval(node.args[0])
                if flag.startswith("--"):
                    yield flag, {k.arg: ast.unparse(k.value).strip("'") for k in node.keywords if k.arg}


def test_instruments_write_lists_and_name_what_they_take_as_the_commands_do() -> None:
    declared = [*flags_of_instruments()]
    assert len(declared) > 50
    assert [flag for flag, how in declared if "nargs" in how] == []
    assert [flag for flag, _ in declared if flag in {*FORMERLY} - KEPT] == []
    metavars = {flag: str(action.metavar) for _, flag, action in OPTIONS}
    shared = [(flag, how) for flag, how in declared if flag in metavars and "metavar" in how and flag != "--out"]
    assert [flag for flag, how in shared if how["metavar"].removesuffix(",...") not in metavars[flag]] == []


def test_instruments_guess_no_flag_either() -> None:
    files = [path for folder in ("proof", "scripts", "vllm_kvq") for path in (ROOT / folder).glob("**/*.py")]
    made = [line for path in files for line in path.read_text(encoding="utf-8").split("argparse.ArgumentParser(")[1:]]
    assert made
    assert [line[:60] for line in made if "allow_abbrev=False" not in line[:200]] == []

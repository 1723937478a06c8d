"""The runner that plants faults says caught, survived or unusable, and leaves the tree unchanged."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proof.mutants import main
from proof.mutants.fault import Fault, Stale
from proof.mutants.kept import Kept
from proof.mutants.pytests import Pytests

TEXT = "def double(x):\n    return 2 * x\n"
FAULT = Fault("halves", "double.py", "2 * x", "x / 2", "tests/test_double.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "double.py").write_text(TEXT)
    return tmp_path


def ends_with(status: int, fails_without: bool = False) -> Callable[[Path, str], int]:
    """A pytest with this exit status under the fault, which passes without one unless told to fail."""

    def run(root: Path, arguments: str) -> int:
        assert arguments == FAULT.tests
        planted = (root / "double.py").read_text() == TEXT.replace("2 * x", "x / 2")
        return status if planted else int(fails_without)

    return run


def planted(tree: Path, pytest_: Callable[[Path, str], int], *faults: Fault) -> tuple[main.Outcome, list[str]]:
    said: list[str] = []
    outcome = main.plant(faults or (FAULT,), [tree], pytest_, said.append)
    assert (tree / "double.py").read_text() == TEXT
    return outcome, said


def test_a_fault_that_the_tests_notice(tree: Path) -> None:
    outcome, said = planted(tree, ends_with(1))
    assert (outcome.caught, outcome.survived, outcome.unusable, outcome.status) == (["halves"], [], [], 0)
    assert said == ["caught    halves (double.py)"]
    assert outcome.line() == "1 caught, 0 survived, 0 unusable"


def test_a_fault_that_they_do_not_notice(tree: Path) -> None:
    outcome, said = planted(tree, ends_with(0))
    assert (outcome.caught, outcome.survived, outcome.unusable, outcome.status) == ([], ["halves"], [], 1)
    assert said == ["survived  halves (double.py)"]


def test_one_that_survives_is_enough(tree: Path) -> None:
    other = Fault("triples", "double.py", "2 * x", "3 * x", FAULT.tests)
    outcome, _ = planted(tree, ends_with(1), FAULT, other)
    assert (outcome.caught, outcome.survived, outcome.status) == (["halves"], ["triples"], 1)


def test_tests_that_crash_have_caught_it(tree: Path) -> None:
    outcome, _ = planted(tree, ends_with(-signal.SIGSEGV))
    assert (outcome.caught, outcome.unusable, outcome.status) == (["halves"], [], 0)


@pytest.mark.parametrize("status", [2, 3, 4, 5, -9, 137])
def test_tests_that_did_not_run(status: int, tree: Path) -> None:
    """Interrupted, an internal error, wrong usage, no test of that name, killed: nothing was tested."""
    outcome, said = planted(tree, ends_with(status))
    assert (outcome.caught, outcome.unusable, outcome.status) == ([], ["halves"], 1)
    assert f"status {status}: nothing was tested" in said[0]


@pytest.mark.parametrize("control", [1, 2, 5])
def test_tests_that_do_not_pass_without_a_fault(control: int, tree: Path) -> None:
    outcome, said = planted(tree, lambda root, _: 1 if "x / 2" in (root / "double.py").read_text() else control)
    assert (outcome.caught, outcome.survived, outcome.unusable, outcome.status) == ([], [], [FAULT.tests], 1)
    assert "do not pass" in said[0]


@pytest.mark.parametrize(
    ("stale", "why"),
    [
        (Fault("gone", "double.py", "3 * x", "x", FAULT.tests), "0 times"),
        (Fault("twice", "double.py", "x", "y", FAULT.tests), "2 times"),
        (Fault("no file", "triple.py", "x", "y", FAULT.tests), "does not exist"),
    ],
    ids=lambda x: x.name if isinstance(x, Fault) else "",
)
def test_a_fault_that_no_longer_applies(stale: Fault, why: str, tree: Path) -> None:
    with pytest.raises(Stale, match=why):
        stale.apply(tree)
    outcome, said = planted(tree, ends_with(1), stale, FAULT)
    assert (outcome.caught, outcome.unusable, outcome.status) == (["halves"], [stale.name], 1)
    assert why in said[0]


def test_the_file_is_restored_when_pytest_cannot_run(tree: Path) -> None:
    def broken(root: Path, _: str) -> int:
        if (root / "double.py").read_text() != TEXT:
            raise OSError("no memory")
        return 0

    with pytest.raises(OSError, match="no memory"):
        planted(tree, broken)
    assert (tree / "double.py").read_text() == TEXT


def test_nothing_caught_is_no_success() -> None:
    assert main.Outcome().status == 1


def test_each_tree_holds_one_fault_at_a_time(tmp_path: Path) -> None:
    trees = [tmp_path / name for name in "ab"]
    for each in trees:
        each.mkdir()
        (each / "double.py").write_text(TEXT)
    faults = [Fault(f"plus {i}", "double.py", "2 * x", f"2 * x + {i}", FAULT.tests) for i in range(1, 9)]
    seen: list[str] = []

    def run(root: Path, _: str) -> int:
        text = (root / "double.py").read_text()
        seen.append(text)
        return int(text != TEXT)

    outcome = main.plant(faults, trees, run, lambda _: None)
    assert outcome.caught == [f.name for f in faults]
    assert sorted(seen) == sorted([TEXT, *(TEXT.replace("2 * x", f.after) for f in faults)])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it chooses, what it plants again, and its exit status. The copies hold only one file."""
    (tmp_path / "double.py").write_text(TEXT)
    kept = ["--kept", str(tmp_path / "caught.txt")]
    slow = Fault("sleeps", "double.py", "2 * x", "4 * x", FAULT.tests, slow=True)
    monkeypatch.setattr(main, "FAULTS", (FAULT, slow))
    monkeypatch.setattr(main, "ROOT", tmp_path)
    monkeypatch.setattr(main, "copy_checkout", lambda root: root.mkdir() or (root / "double.py").write_text(TEXT))
    monkeypatch.setattr(Pytests, "__call__", lambda self, root, words: ends_with(1)(root, words))
    for status, arguments, line in (
        (0, [], "1 caught, 0 survived, 0 unusable of 1 faults"),
        (1, ["--all"], "1 caught, 1 survived, 0 unusable of 2 faults"),
        (1, ["--all", "--only", "sleeps"], "0 caught, 1 survived, 0 unusable of 1 faults"),
        (0, ["--only", "halves", "--jobs", "1"], "1 caught, 0 survived, 0 unusable of 1 faults"),
        (0, ["--only", "halves", "--afresh"], "1 caught, 0 survived, 0 unusable of 1 faults"),
    ):
        before = kept_lines(tmp_path / "caught.txt")
        assert main.main([*arguments, *kept]) == status
        assert line in (said := capsys.readouterr().out)
        again = before and "sleeps" not in arguments and "--afresh" not in arguments
        assert ("not caught in earlier runs (1)" in said) == bool(again)
        assert [name for _, name in kept_lines(tmp_path / "caught.txt")] == ["halves"]
    no_page = ["--only", "halves", "--report", "page.md"]
    for wrong in (["--only", "no such fault"], ["--jobs", "0"], ["--only", "sleeps"], no_page):
        with pytest.raises(SystemExit) as stop:
            main.main(wrong)
        assert stop.value.code == 2


def kept_lines(path: Path) -> list[tuple[str, ...]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return [tuple(line.split(" ", 1)) for line in lines]


def test_a_run_goes_on_where_it_was_stopped(tree: Path) -> None:
    """A fault that was caught is not planted again as long as it, its file and its tests still do the same."""
    (tree / "tests").mkdir()
    (tests := tree / "tests" / "test_double.py").write_text('"""What it is about."""\n')
    triples = Fault("triples", "double.py", "2 * x", "3 * x", FAULT.tests)
    runs: list[str] = []

    def run(root: Path, _: str) -> int:
        runs.append((root / "double.py").read_text())
        return int("x / 2" in runs[-1])

    words, code = '# a comment\n"""and a docstring"""\n', "\nX = 1\n"
    for times, change, more in (
        *((3, None, ""), (2, None, ""), (2, tests, words), (3, tests, code)),
        *((2, tree / "double.py", words), (3, tree / "double.py", code), (3, tests, "def (")),
    ):
        if change is not None:
            change.write_text(change.read_text() + more)
        runs.clear()
        kept = Kept(tree / "kept", tree, (FAULT, triples))
        outcome = main.plant((FAULT, triples), [tree], run, lambda _: None, kept=kept)
        assert (outcome.caught, outcome.survived, len(runs)) == (["halves"], ["triples"], times)
    (_, name), *others = kept_lines(tree / "kept")
    assert (name, others) == ("halves", [])
    Kept(tree / "kept", tree, (triples,)).keep(triples)
    assert [name for _, name in kept_lines(tree / "kept")] == ["triples"], "it is no longer among the faults"


def test_another_function_changes_nothing(tree: Path) -> None:
    """Only the function with the fault counts, where the fault names one, whatever its indentation."""
    one = replace(FAULT, where="double.py::double")
    Kept(tree / "kept", tree, (one,)).keep(one)
    (tree / "double.py").write_text(f"X = 1\n\n\n{TEXT}\n\ndef other():\n    return 1\n")
    assert one in Kept(tree / "kept", tree, (one,))
    (tree / "double.py").write_text(TEXT.replace("(x)", "(x, y=1)"))
    assert one not in Kept(tree / "kept", tree, (one,))
    method = replace(FAULT, where="double.py::Of.double", after="3 * x")
    (tree / "double.py").write_text("class Of:\n    def double(x):\n        return 2 * x\n")
    Kept(tree / "kept", tree, (method,)).keep(method)
    (tree / "double.py").write_text('class Of:\n    def double(x):\n        """Of x."""\n        return 2 * x\n')
    assert method in Kept(tree / "kept", tree, (method,))


def test_what_is_recorded_is_what_was_tested(tree: Path) -> None:
    """The checkout may change while a copy of it is tested."""
    kept = Kept(tree / "kept", tree, (FAULT,))
    assert FAULT not in kept
    (tree / "double.py").write_text(TEXT + "X = 1\n")
    kept.keep(FAULT)
    assert FAULT not in Kept(tree / "kept", tree, (FAULT,))
    (tree / "double.py").write_text(TEXT)
    assert FAULT in Kept(tree / "kept", tree, (FAULT,))


def test_the_page(tree: Path) -> None:
    """All that were planted, by folder; those not caught, by name."""
    triples = Fault("triples", "double.py", "2 * x", "3 * x", FAULT.tests)
    gone = Fault("gone", "double.py", "3 * x", "x", FAULT.tests)
    outcome, _ = planted(tree, ends_with(1), FAULT, triples, gone)
    lines = main.page((FAULT, triples, gone), outcome, "1 caught").splitlines()
    assert ".                             3      1" in lines
    assert [line for line in lines if line.startswith("* ")] == ["* survived: triples", "* unusable: gone"]
    assert "    python -m proof mutants" in lines
    assert any("were left out" in line for line in lines)
    slow = replace(FAULT, slow=True)
    outcome, _ = planted(tree, ends_with(1), slow)
    lines = main.page((slow,), outcome, "1 caught").splitlines()
    assert "    python -m proof mutants --all" in lines
    assert not [line for line in lines if line.startswith("* ") or "left out" in line]


def test_the_copy_has_what_git_knows(tmp_path: Path) -> None:
    main.copy_checkout(tmp_path / "copy")
    assert (tmp_path / "copy" / "proof" / "mutants" / "main.py").is_file()
    assert (tmp_path / "copy" / "vllm_kvq" / "csrc").is_symlink()
    assert not (tmp_path / "copy" / ".git").exists()


def test_a_module_of_the_copy_is_valid_by_its_contents(tmp_path: Path) -> None:
    """And not by its time and size, which are the first eight of these bytes in an ordinary compiled module."""
    (source := tmp_path / "proof" / "double.py").parent.mkdir()
    source.write_text(TEXT)
    main.compile_modules(tmp_path)
    compiled = Path(importlib.util.cache_from_source(str(source))).read_bytes()
    assert compiled[8:16] == importlib.util.source_hash(source.read_bytes())

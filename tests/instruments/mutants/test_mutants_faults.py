"""A planted fault is a change of one function; and those of the catalog apply."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.mutants.catalog import FAULTS
from proof.mutants.fault import Fault, Stale

ROOT = Path(__file__).parents[3]
LEAST = 600
TWO = """def largest(rows):
    return max(rows) + x

class Pair:
    @property
    def x(self):
        return scaled(
            self.first,
            x - 1,
        )

    def y(self):
        return scaled(self.first, x - 1)
"""


def planted(folder: Path, where: str, before: str, after: str) -> str:
    (folder / "two.py").write_text(TWO)
    return Fault("n", where, before, after, "tests").planted(folder)


@pytest.mark.parametrize(
    ("before", "after", "tests"),
    [(" ", "3", "tests"), ("x", "x", "tests"), ("2", "3", "")],
    ids=["text", "change", "tests"],
)
def test_faults_that_are_none(before: str, after: str, tests: str) -> None:
    with pytest.raises(ValueError, match="changes nothing, or names no tests"):
        Fault("n", "double.py", before, after, tests)


def test_only_the_named_function_changes(tmp_path: Path) -> None:
    found = planted(tmp_path, "two.py::Pair.y", "x - 1", "x + 1")
    assert found == TWO.replace("(self.first, x - 1)", "(self.first, x + 1)")
    assert planted(tmp_path, "two.py::Pair.x", "@property", "") == TWO.replace("@property", "")


def test_lines_may_be_wrapped_otherwise(tmp_path: Path) -> None:
    found = planted(tmp_path, "two.py::Pair.x", "scaled(self.first, x - 1)", "x")
    assert found.startswith(TWO[: TWO.index("scaled")] + "x\n\n    def y")


def test_words_are_whole(tmp_path: Path) -> None:
    assert planted(tmp_path, "two.py::largest", "x", "y") == TWO.replace("+ x", "+ y")


@pytest.mark.parametrize(
    ("where", "before", "after", "why"),
    [
        ("two.py::Pair.z", "x", "y", "defined 0 times"),
        ("two.py::y", "x", "y", "defined 0 times"),
        ("two.py::Pair", "x - 1", "x", "2 times"),
        ("two.py::largest", "max(rows", "min rows", "not Python"),
        ("two.py::largest", "max(rows)", "(max(rows))", "is the same"),
        ("one.py", "x", "y", "does not exist"),
    ],
)
def test_what_no_longer_applies(where: str, before: str, after: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Stale, match=why):
        planted(tmp_path, where, before, after)


def test_a_name_that_is_defined_twice(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO + "def largest(rows):\n    return rows\n")
    with pytest.raises(Stale, match="defined 2 times"):
        Fault("n", "two.py::largest", "rows", "None", "tests").planted(tmp_path)


def test_files_in_other_languages(tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text("return a <\n    b;")
    assert Fault("n", "one.cpp", "a < b", "a <= b", "tests").planted(tmp_path) == "return a <= b;"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_every_fault_applies(fault: Fault) -> None:
    """And its tests exist."""
    assert fault.planted(ROOT)
    for word in fault.tests.split():
        if "/" in word:
            assert (ROOT / word.partition("::")[0]).exists(), word


def test_names_are_unique() -> None:
    names = [f.name for f in FAULTS]
    assert len(set(names)) == len(names)


def test_faults_are_enough_and_everywhere() -> None:
    assert len(FAULTS) >= LEAST
    files = {f.file for f in FAULTS}
    for folder in ("vllm_kvq/formats", "vllm_kvq/kernels", "vllm_kvq/integration", "vllm_kvq/bench", "csrc", "proof"):
        assert any(name.startswith(folder) for name in files), f"no fault is planted in {folder}"

"""A fault that `make mutants` plants is noticed by the usual run, too: a test that it names is not marked `wide`."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from proof.mutants.catalog import FAULTS
from proof.mutants.pytests import PASSED

ROOT = Path(__file__).parents[3]
NAMED = sorted({fault.tests for fault in FAULTS})


def files(tests: str) -> list[str]:
    """The files among pytest's arguments."""
    return [word.partition("::")[0] for word in shlex.split(tests) if "/" in word]


def chosen(tests: str, ids: Iterable[str]) -> list[str]:
    """Those of the tests with these ids that pytest would run, given these arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="")  # pytest takes the last of several
    named, where = parser.parse_known_args(shlex.split(tests))
    found = [i for i in ids if any(i == w or i.startswith((f"{w}::", f"{w}/", f"{w}[")) for w in where)]
    wanted = Expression.compile(named.k) if named.k else None
    return [i for i in found if wanted is None or wanted.evaluate(functools.partial(is_part, i))]


def is_part(test: str, name: str, **_: object) -> bool:
    """Whether `-k name` chooses the test with this id: part of its file's name or of a later one, in any case."""
    path, *names = test.lower().split("::")
    return any(name.lower() in part for part in (path.rpartition("/")[2], *names))


@pytest.fixture(scope="module")
def usual(request: pytest.FixtureRequest) -> list[str]:
    """The tests of the usual run; not collected a second time when all modules are already, as in `make test`."""
    everything = {f for tests in NAMED for f in files(tests)}
    items = request.session.items
    if everything <= {item.nodeid.partition("::")[0] for item in items}:
        return [item.nodeid for item in items if item.get_closest_marker("wide") is None]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(everything)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == PASSED, done.stdout[-3000:] + done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_fault_has_a_test_in_the_usual_run(usual: list[str]) -> None:
    unnoticed = [fault.name for fault in FAULTS if not chosen(fault.tests, usual)]
    assert not unnoticed, "all tests that these faults name are `wide`, or there are none"


def test_arguments_are_read_as_pytest_reads_them() -> None:
    ids = ["tests/a/test_x.py::test_one[V1-qjl3]", "tests/a/test_x.py::test_two", "tests/a/test_xy.py::test_one[qjl3]"]
    of = functools.partial(chosen, ids=ids)
    assert of("tests/a/test_x.py") == ids[:2]
    assert of("tests/a") == ids
    assert of("tests/a/test_x.py::test_one") == ids[:1]
    assert of("tests/a/test_x.py -k 'one and QJL3'") == ids[:1]
    assert of("tests/a/test_x.py tests/a/test_xy.py -k one[q") == ids[2:]
    assert of("tests/a/test_x.py -k 'not one' -k nothing") == []
    assert of("tests/a -k test_xy") == ids[2:]


@pytest.mark.parametrize(
    ("words", "status", "made"),
    [
        ([], 0, [["--jobs=2", "kernels", "lint", "types"], ["test"]]),
        (["wide"], 0, [["test", "PYTEST_ARGS=-m wide"]]),
        (["wider"], 2, []),
    ],
)
def test_what_ci_runs(words: list[str], status: int, made: list[list[str]], tmp_path: Path) -> None:
    """`make` only writes down what it is asked for."""
    make, asked = tmp_path / "make", tmp_path / "asked"
    make.write_text(f"#!/bin/sh\nprintf '%s\\t' \"$@\" >> {asked}; echo >> {asked}\n")
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "run", *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    lines = asked.read_text().splitlines() if asked.exists() else []
    assert [line.rstrip("\t").split("\t") for line in lines] == [["--no-print-directory", *one] for one in made]
    assert ("no lane 'wider'" in done.stderr) == (status == 2)

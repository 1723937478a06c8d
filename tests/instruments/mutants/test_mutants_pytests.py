"""pytest under a planted fault: forked in the copy after third-party imports, and stopped with all it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from proof.mutants import main, pytests
from proof.mutants.fault import Fault
from proof.mutants.pytests import FAILED, INTERRUPTED, PASSED, Pytests

ROOT = Path(__file__).parents[3]
TEXT = "def double(x):\n    return 2 * x\n"
FAULT = Fault("halves", "double.py", "2 * x", "x / 2", "tests/test_double.py")


def test_pytest_runs_in_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its sources, and pytest's own exit statuses."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # to start sooner
    monkeypatch.setattr(pytests, "IMPORTED", ("_pytest.main",))
    (tmp_path / "double.py").write_text(TEXT)
    (tmp_path / "test_double.py").write_text(
        "from double import double\ndef test() -> None:\n    assert double(3) == 6\n"
    )
    run = Pytests(tmp_path)
    assert run(tmp_path, "test_double.py") == PASSED
    assert run(tmp_path, "test_double.py -k nothing") not in (PASSED, FAILED)
    FAULT.apply(tmp_path)
    assert run(tmp_path, "test_double.py") == FAILED
    run.stop()
    assert run(tmp_path, "test_double.py") == INTERRUPTED


OBSERVED = """
import json, os, pathlib, sys
state = {
    "modules": [name for name in sys.modules if name in ("sympy", "vllm", "triton", "vllm_kvq", "proof", "json.tool")],
    "path": sys.path[0], "argv": sys.argv, "group": os.getpgid(0) == os.getpid(),
}
pathlib.Path("state.json").write_text(json.dumps(state))
"""
"""Runs in place of pytest and notes in which process it is."""


def test_pytest_starts_with_what_others_have_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported once for all faults is neither the code under test nor what reads a test's variables."""
    monkeypatch.setattr(pytests, "IMPORTED", ("proof.mutants.fault", "vllm_kvq", "json.tool"))
    for package in ("proof", "vllm_kvq"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "proof" / "mutants").mkdir()
    (tmp_path / "proof" / "mutants" / "fault.py").write_text("")
    (tmp_path / "pytest.py").write_text(OBSERVED)
    run = Pytests(tmp_path)
    assert run(tmp_path, "test_double.py -k 'a b'") == PASSED
    run.stop()
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["modules"] == ["json.tool"]
    assert (state["path"], state["group"]) == (str(tmp_path), True)
    assert state["argv"][-3:] == ["test_double.py", "-k", "a b"]


def test_a_library_that_a_fault_changes_is_compiled_from_kept_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytests, "IMPORTED", ())
    (source := tmp_path / "csrc" / "cpu" / "a.cpp").parent.mkdir(parents=True)
    source.write_text("int a() { return 1; }")
    (tmp_path / "pytest.py").write_text("import os, pathlib; pathlib.Path('cxx').write_text(os.environ.get('CXX', ''))")
    monkeypatch.setenv("CXX", "g++")
    with Pytests(tmp_path / "objects") as run:
        for text, expected in (("1", "g++"), ("2", f"{tmp_path / 'objects'} g++"), ("1", "g++")):
            source.write_text(source.read_text().replace("1", text).replace("2", text))
            assert run(tmp_path, "any") == PASSED
            assert (tmp_path / "cxx").read_text().endswith(expected)


def test_objects_are_kept_by_what_is_compiled(tmp_path: Path) -> None:
    def compile(name: str, text: str, *flags: str) -> int:
        (source := tmp_path / name).write_text(text)
        command = [sys.executable, str(pytests.COMPILER), str(tmp_path), "g++", *flags]
        command += ["-c", str(source), "-o", str(tmp_path / "out")]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode

    def kept() -> list[bytes]:
        return [path.read_bytes() for path in tmp_path.glob("*.o")]

    one = "int f() { return 1; }"
    for objects, arguments in (
        (1, ("a.cpp", one)),
        (1, ("b.cpp", f"// the same\n{one}")),
        (2, ("a.cpp", one, "-DX", "-O1")),
        (3, ("a.cpp", "int f() { return 2; }")),
    ):
        (tmp_path / "out").unlink(missing_ok=True)
        assert compile(*arguments) == 0
        assert len(kept()) == objects
        assert (tmp_path / "out").read_bytes() in kept()
    for broken in ("int f() { return }", '#include "nothing.h"'):
        assert compile("c.cpp", broken) != 0
        assert len(kept()) == 3
    asked = [sys.executable, str(pytests.COMPILER), str(tmp_path), "g++", "--version"]
    assert subprocess.run(asked, capture_output=True, text=True).stdout.startswith("g++")


def test_a_tree_whose_process_dies_has_tested_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytests, "IMPORTED", ())
    (tmp_path / "pytest.py").write_text("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert Pytests(tmp_path)(tmp_path, "any") not in (PASSED, FAILED)


SLEEPING = """
import os, subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with open(os.environ["PIDS"], "a") as pids:
    pids.write(f"{os.getpid()} {server.pid}\\n")
time.sleep(60)
"""
"""Runs in place of pytest, in the folder where it is started: it never exits, and neither does the server it starts."""
COMMAND = """
import pathlib, sys
from proof.mutants import main, pytests
from proof.mutants.fault import Fault
pytests.IMPORTED = ()
main.FAULTS = [Fault(name, "double.py", "2", "3", name) for name in "abcd"]
def copy(root):
    root.mkdir()
    (root / "double.py").write_text("2")
    (root / "pytest.py").write_text(pathlib.Path(sys.argv[1]).read_text())
main.copy_checkout = copy
sys.exit(main.main(["--jobs", "2"]))
"""


def processes(pids: Path) -> list[psutil.Process]:
    """Those of these processes that are running."""
    numbers = map(int, pids.read_text(encoding="utf-8").split())
    found = [psutil.Process(pid) for pid in numbers if psutil.pid_exists(pid)]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_stopped_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    pids, copies, fake = tmp_path / "pids", tmp_path / "copies", tmp_path / "fake"
    copies.mkdir()
    fake.write_text(SLEEPING)
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(fake)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(copies), "PIDS": str(pids)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not pids.exists() or pids.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = processes(pids)
    assert len(started) == 4
    assert any(copies.iterdir())
    child.send_signal(number)
    _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (main.STOPPED, "stopped; the copies are removed\n")
    assert not any(copies.iterdir())
    assert not psutil.wait_procs(started, 10)[1]
    assert pids.read_text().count("\n") == 2, "others were begun after the signal"


def test_tests_that_hang_end_with_all_that_they_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytests, "TIMEOUT", 3.0)
    monkeypatch.setattr(pytests, "IMPORTED", ())
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    (tmp_path / "pytest.py").write_text(SLEEPING)
    assert Pytests(tmp_path)(tmp_path, "any") == FAILED
    assert not psutil.wait_procs(processes(tmp_path / "pids"), 10)[1]

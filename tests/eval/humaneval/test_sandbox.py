"""Programs that hang, fork, eat memory or use the network cost their limit and nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from vllm_kvq.eval.humaneval import sandbox
from vllm_kvq.eval.humaneval.sandbox import Limits, Verdict

SMALL = Limits(cpu_seconds=1, seconds=60, memory_bytes=1 << 28)


def run(program: str, namespaces: bool, limits: Limits = SMALL) -> Verdict:
    return sandbox.run(program, limits, namespaces)


def test_a_program_that_comes_to_its_end(namespaces: bool) -> None:
    verdict = run("import re, math, threading, socket\nassert math.sqrt(4) == 2", namespaces)
    assert verdict == Verdict(True, "passed", "namespaces" if namespaces else "guard")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError: "),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("from typing import int", "ImportError: cannot import name 'int' from 'typing' (typing.py)"),
        ("import os; os._exit(0)", "it exited before its end"),
        ("import os; os._exit(97)", "it exited before its end"),
        ("import os; os.abort()", "killed by SIG"),
        ("f = lambda: f()\nf()", "RecursionError: "),
        ("import os; os.write(3, b'passed'); os._exit(0)", ""),
    ],
    ids=["wrong", "not Python", "exit", "import", "_exit", "_exit with a status", "abort", "recursion", "claims"],
)
def test_any_other_end_is_no_pass(program: str, reason: str, namespaces: bool) -> None:
    verdict = run(program, namespaces)
    assert not verdict.passed
    assert verdict.reason.startswith(reason)


def test_a_forked_copy_has_no_say(namespaces: bool) -> None:
    """Only the program's own process can pass, and what its copies do does not count."""
    assert not run("import os\nif os.fork(): os._exit(0)", namespaces).passed
    assert run("import os\nif not os.fork(): raise ValueError", namespaces).passed


def test_a_loop_costs_its_processor_time(namespaces: bool) -> None:
    assert run("while True: pass", namespaces).reason == "still running after 1 s of processor time"


def test_so_does_one_that_takes_no_notice(namespaces: bool) -> None:
    program = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(program, namespaces).reason == "still running after 1 s of processor time"


def test_a_sleep_costs_its_time(namespaces: bool) -> None:
    begun = time.monotonic()
    verdict = run("import time; time.sleep(600)", namespaces, Limits(seconds=1))
    assert verdict.reason == "still running after 1 s"
    assert time.monotonic() - begun < sandbox.GRACE


def test_memory_is_limited(namespaces: bool) -> None:
    assert run("x = bytearray(1 << 29)", namespaces).reason == "MemoryError"


def test_files_are_limited(namespaces: bool) -> None:
    assert "File too large" in run("open('x', 'wb').write(bytes(1 << 21))", namespaces).reason


def test_a_program_that_forks_without_end(namespaces: bool) -> None:
    program = "import os, time\nwhile True:\n    if not os.fork(): time.sleep(600)"
    assert "unavailable" in run(program, namespaces).reason
    assert not left_over()


def test_processes_and_threads_are_counted(namespaces: bool) -> None:
    if os.getuid() and not namespaces:
        pytest.skip("the limit counts all of this user's processes, which come and go")
    limits = Limits(processes=3)
    program = (
        "import threading\nend = threading.Event()\ntry:\n    for _ in range({}):\n"
        "        threading.Thread(target=end.wait).start()\nfinally:\n    end.set()"
    )
    assert run(program.format(2), namespaces, limits).passed
    assert "can't start new thread" in run(program.format(3), namespaces, limits).reason


def test_what_hides_from_its_session_dies_too(namespaces: bool) -> None:
    """It forks, starts a new session, forks again, and lets its parents exit."""
    hides = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(60)\n"
    hides += "    os._exit(0)\nos.wait()"
    assert run(hides, namespaces).passed
    assert not left_over()


def left_over() -> list[str]:
    """Processes in a sandbox's folder that no longer exists."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cwd"):
        try:
            folder = os.readlink(process)
        except OSError:
            continue
        if "kvq-sandbox-" in folder and folder.endswith("(deleted)"):
            found.append(folder)
    return found


def test_there_is_no_network(namespaces: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass  # without the sandbox it can be reached
        verdict = run(f"import socket; socket.create_connection(('127.0.0.1', {port}))", namespaces)
    assert not verdict.passed
    assert "unreachable" in verdict.reason or "no network" in verdict.reason


def test_nothing_is_inherited(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    assert run("import os; assert 'A_SECRET' not in os.environ", namespaces).passed
    assert run("import sys; assert not sys.stdin.read()", namespaces).passed


def test_sets_have_the_same_order_each_time(namespaces: bool) -> None:
    order = "assert 0, list({'a', 'b', 'c', 'd', 'e'})"
    assert len({run(order, namespaces).reason for _ in range(3)}) == 1


def test_it_may_not_kill_its_watcher(namespaces: bool) -> None:
    """In its own namespace it is the first process, which nobody inside can kill, and it sees no other."""
    verdict = run("import os\nfor p in (os.getppid(), 0): os.kill(p, 9)", namespaces)
    assert "watched" not in verdict.reason
    assert verdict.passed is (verdict.isolation == "namespaces")


HALF_ALLOWED = """
import importlib.util, os
from pathlib import Path
spec = importlib.util.spec_from_file_location("process", {path!r})
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)
watcher = os.getpid()


def unshare(flags):
    assert os.getpid() != watcher, "a process that is half in can't go back"
    return 0


def refuse(path, *_, **__):
    assert str(path).startswith("/proc/self/"), path
    raise PermissionError(1, "Operation not permitted", str(path))


process.libc.unshare, process._other_user, Path.write_text = unshare, lambda: None, refuse
process.main()
"""


def test_namespaces_that_can_be_made_but_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users of Ubuntu 24.04, where AppArmor refuses what comes after `unshare`."""
    script = tmp_path / "half_allowed.py"
    script.write_text(HALF_ALLOWED.format(path=str(sandbox.PROCESS)))
    monkeypatch.setattr(sandbox, "PROCESS", script)
    assert run("", namespaces=True) == Verdict(True, "passed", "guard")


def test_a_program_that_can_t_be_limited_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is no verdict on it, only the reason."""
    shutil.copy(sandbox.PROCESS, tmp_path)
    (tmp_path / "sandbox_walls.py").write_text("def build(*_):\n    raise OSError('no walls here')")
    monkeypatch.setattr(sandbox, "PROCESS", tmp_path / sandbox.PROCESS.name)
    with pytest.raises(RuntimeError, match="no walls here"):
        sandbox.run("")


def test_a_sandbox_that_can_t_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is no verdict on the program."""
    monkeypatch.setattr(sandbox, "PROCESS", Path("/nowhere.py"))
    with pytest.raises(RuntimeError, match="could not be tested in a sandbox"):
        sandbox.run("")


@pytest.mark.parametrize("name", ["cpu_seconds", "seconds", "memory_bytes", "file_bytes", "processes"])
def test_limits_leave_something(name: str) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Limits(**{name: 0})

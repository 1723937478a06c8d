"""Programs that try to break out of the sandbox: to read secrets, fill the disk, reach others, or stay."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sandbox import left_over

from vllm_kvq.eval.humaneval import sandbox, sandbox_walls
from vllm_kvq.eval.humaneval.sandbox import Limits, Verdict

SMALL = Limits(cpu_seconds=2, seconds=60, memory_bytes=1 << 28, folder_bytes=1 << 22, files=50)
HAS_LANDLOCK = ctypes.CDLL(None).syscall(sandbox_walls.CREATE_RULESET, None, ctypes.c_size_t(0), 1) > 0
USER = 1234567
"""Somebody else, as whom root tests."""
landlock = pytest.mark.skipif(not HAS_LANDLOCK, reason="this Linux has no Landlock")


def run(program: str, namespaces: bool, limits: Limits = SMALL) -> Verdict:
    return sandbox.run(program, limits, namespaces)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter: a `tmp_path` lies in one that is closed to all others."""
    folder = Path(tempfile.mkdtemp(prefix="kvq-open-"))
    folder.chmod(0o755)
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)  # however deep it is


# -- the disk ---------------------------------------------------------------------------------------------------------
FULL = "more than 4194304 bytes or 50 files in its folder"


@pytest.mark.parametrize(
    "program",
    [
        "import time\nfor i in range(5): open(str(i), 'wb').write(bytes(1 << 20))\ntime.sleep(50)",
        "import os, time\nfor i in range(51): os.mkdir(str(i))\ntime.sleep(50)",
        "import os, time\nos.mkdir('a')\nos.chdir('a')\nfor i in range(51): open(str(i), 'w')\ntime.sleep(50)",
        "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 20))\n    i += 1",
    ],
    ids=["bytes", "folders", "below", "without end"],
)
def test_its_folder_takes_so_much(program: str, namespaces: bool) -> None:
    """A limit on single files does not limit their number."""
    assert run(program, namespaces).reason == FULL


def test_folders_in_folders(namespaces: bool, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper than Python's own removal goes, in folders that may not be opened."""
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    program = "import os\nfor i in range(1200): os.mkdir('a'); os.chdir('a')\nos.mkdir('b', 0)"
    verdict = run(program, namespaces, Limits(seconds=60, files=2000))
    assert verdict.passed or os.getuid()  # only root can look into b, and what can't be looked at counts as too much
    assert not [*open_folder.iterdir()]


# -- what it says ------------------------------------------------------------------------------------------------------
def test_it_may_say_no_end_of_things(namespaces: bool) -> None:
    """To the pipe through which it reports: nothing piles up in the process that reads it."""
    program = "import os\nwhile True:\n    for fd in range(3, 9):\n        try: os.write(fd, b'x' * 65536)\n"
    program += "        except OSError: pass"
    verdict = run(program, namespaces, Limits(cpu_seconds=2, seconds=2))
    assert not verdict.passed
    assert len(verdict.reason) <= 300


def test_a_terminal_obeys_nothing_that_it_says(namespaces: bool) -> None:
    assert run("raise ValueError('a\\x1b[2J\\x07b')", namespaces).reason == "ValueError: a?[2J?b"


# -- others -----------------------------------------------------------------------------------------------------------
@landlock
def test_it_writes_to_its_own_folder_only(namespaces: bool, open_folder: Path) -> None:
    open_folder.chmod(0o777)
    assert run("open('x', 'w').write('y'); assert open('x').read() == 'y'", namespaces).passed
    assert not run(f"open({str(open_folder / 'x')!r}, 'w')", namespaces).passed
    assert not [*open_folder.iterdir()]


@landlock
def test_it_reads_no_secrets(namespaces: bool, open_folder: Path) -> None:
    """Even where it takes root's Python, and with it the right to read everything, to run it."""
    secret = open_folder / "token"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, Path("/etc/passwd"), Path("/proc/1/cmdline"), Path("/proc/self/environ")):
        assert run(f"open({str(path)!r}).read()", namespaces).reason.startswith("PermissionError: ")
    assert run(f"import os; os.listdir({str(open_folder)!r})", namespaces).reason.startswith("PermissionError: ")


def test_what_it_needs_is_there(namespaces: bool) -> None:
    """The standard library, installed packages, and other programs."""
    program = "import asyncio, ctypes, datetime, decimal, json, random, sqlite3, subprocess, tempfile, numpy\n"
    program += "assert numpy.linalg.norm(numpy.ones(4)) == 2\nrandom.SystemRandom().random()\n"
    program += "asyncio.run(asyncio.sleep(0))\nopen('/dev/null', 'w').write('x')\n"
    program += "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
    program += "assert subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout == 'x\\n'"
    assert run(program, namespaces, Limits(memory_bytes=1 << 31)) == run("", namespaces)


CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
NO_CALL = f"{CALL}assert {{}} == -1 and ctypes.get_errno() in (1, 101), ctypes.get_errno()"


@pytest.mark.parametrize(
    "call",
    [
        "libc.socket(2, 1, 0)",
        "libc.socket(1, 1, 0)",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.semget(0, 1, 0o1600)",
        "libc.msgget(0, 0o1600)",
        "libc.ptrace(16, 1, 0, 0)",
        "libc.unshare(0x10000000)",
    ],
    ids=lambda call: call[5:].partition("(")[0],
)
def test_calls_that_are_refused(call: str, namespaces: bool) -> None:
    """Without Python's help. A segment of shared memory would stay when the program is gone."""
    if not sandbox_walls.ARCHITECTURES.get(os.uname().machine):
        pytest.skip("calls are not filtered on this processor")
    assert run(NO_CALL.format(call), namespaces).reason == "passed"


# -- as root, whose Python others can run, too ------------------------------------------------------------------------
@pytest.fixture
def open_python() -> str:
    """A Python that every user can run: in it, root's programs need no right to read what is closed to others."""
    if os.getuid():
        pytest.skip("needs root")
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        code = f"import os, sys; os.setuid({USER}); import json; os.execv({python!r}, [{python!r}, '-P', '-c', ''])"
        if os.path.exists(python) and subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            return python
    pytest.skip("needs a Python of 3.11 or later that every user can run")


def test_a_package_that_only_root_can_read(
    namespaces: bool, open_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when root works in a clone below /root with the system's Python."""
    for path in (sandbox.PROCESS, Path(sandbox_walls.__file__)):
        shutil.copy(path, tmp_path)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sandbox, "PROCESS", tmp_path / sandbox.PROCESS.name)
    monkeypatch.setattr(sys, "executable", open_python)
    assert run("", namespaces).passed


def test_a_temporary_folder_that_only_root_can_enter(
    namespaces: bool, open_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that can't find its own folder would fail for no fault of its own, so there is no verdict."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", open_python)
    with pytest.raises(RuntimeError, match="set TMPDIR to a folder that every user can enter"):
        run("", namespaces)
    assert not [*tmp_path.iterdir()]


# -- as a user that is not root, who owns other files and processes ----------------------------------------------------
AS_USER = """
import importlib.util, json, os, sys
os.setgroups([]); os.setgid({user}); os.setuid({user})
spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
sandbox = sys.modules["sandbox"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)
limits = sandbox.Limits(cpu_seconds=2, seconds=20)
print(json.dumps([vars(sandbox.run(program, limits, {namespaces})) for program in json.load(sys.stdin)]))
"""


class Users:
    """A folder of this user, with the sandbox in it, and another process of the user."""

    def __init__(self, folder: Path, python: str, namespaces: bool, with_landlock: bool) -> None:
        self.folder, self.python, self.namespaces, self.landlock = folder, python, namespaces, with_landlock
        for name in ("sandbox.py", "sandbox_process.py", "sandbox_walls.py"):
            shutil.copy(Path(sandbox.__file__).with_name(name), folder)
        if not with_landlock:
            walls = (folder / "sandbox_walls.py").read_text()
            asks = "version: int = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)"
            assert asks in walls
            (folder / "sandbox_walls.py").write_text(walls.replace(asks, "version = 0"))
        self.file = folder / "file"
        self.file.write_text("secret")
        self.file.chmod(0o600)
        for path in (folder, self.file):
            os.chown(path, USER, USER)
        code = f"import os; os.setgid({USER}); os.setuid({USER}); os.execv({python!r}, [{python!r}, '-c', "
        code += "'import time; print(flush=True); time.sleep(600)'])"
        self.bystander = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, env={"A_SECRET": "1"})
        assert self.bystander.stdout is not None
        self.bystander.stdout.readline()

    def run(self, *programs: str) -> list[Verdict]:
        code = AS_USER.format(user=USER, namespaces=self.namespaces)
        command = [self.python, "-c", code, str(self.folder / "sandbox.py")]
        done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [Verdict(**verdict) for verdict in json.loads(done.stdout)]

    def unharmed(self) -> bool:
        return self.bystander.poll() is None and self.file.read_text() == "secret"


@pytest.fixture(params=["namespaces", "guard", "guard without Landlock"])
def users(request: pytest.FixtureRequest, open_folder: Path, open_python: str) -> Iterator[Users]:
    if not HAS_LANDLOCK and "Landlock" not in request.param:
        pytest.skip("this Linux has no Landlock")
    users = Users(open_folder, open_python, request.param == "namespaces", "without" not in request.param)
    try:
        (verdict,) = users.run("")
        if users.namespaces and verdict.isolation != "namespaces":
            pytest.skip("this system lets users make no namespaces")
        assert verdict.passed
        yield users
    finally:
        users.bystander.kill()
        users.bystander.wait()


def test_it_kills_nobody(users: Users) -> None:
    """Neither the process that watches it nor any other of the user's, by number or all at once."""
    number = users.bystander.pid
    kills = f"import os\nfor p in (os.getppid(), -1, {number}, -{number}):\n    try: os.kill(p, 9)\n"
    kills += "    except OSError: pass"
    by_call = f"{CALL}libc.syscall(424, libc.syscall(434, {number}, 0), 9, 0, 0)\nlibc.syscall(200, {number}, 9)"
    for verdict in users.run(kills, by_call):
        assert "watched" not in verdict.reason
    assert users.unharmed()


def test_it_changes_no_file(users: Users) -> None:
    """Not even one of the user's own, for which no right to write is needed."""
    path = str(users.file)
    truncates, changes, opens = users.run(
        f"import os; os.truncate({path!r}, 0)", f"import os; os.chmod({path!r}, 0o666)", f"open({path!r}).read()"
    )
    assert truncates.reason.startswith("PermissionError: ")
    assert changes.reason.startswith("PermissionError: ")
    assert opens.passed is not users.landlock
    assert users.unharmed()
    assert users.file.stat().st_mode & 0o777 == 0o600


def test_it_leaves_nothing_running(users: Users) -> None:
    """A daemon that first kills the process that watches it."""
    program = "import os, time\n"
    program += "try: os.kill(os.getppid(), 9)\nexcept OSError: pass\n"
    program += (
        "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(60)\n    os._exit(0)\nos.wait()"
    )
    users.run(program)
    deadline = time.monotonic() + 5
    while left := left_over():
        assert time.monotonic() < deadline, left


def test_it_sees_no_ones_environment(users: Users) -> None:
    (verdict,) = users.run(f"open('/proc/{users.bystander.pid}/environ').read()")
    assert verdict.passed is not users.landlock

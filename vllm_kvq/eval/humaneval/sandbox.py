"""Runs a program that a model wrote, in a process that can do little harm, and reports whether it finished.

The process has its own session, an empty environment, a temporary folder to write to, and limits on processor time,
memory, files and processes. If Linux allows namespaces (as root, or if unprivileged user namespaces are enabled), it
has no network interface, and its own process numbers, so whatever it starts dies with it. Otherwise its descendants
are found and killed. Linux refuses it sockets, other processes' memory and what would outlast it, and with Landlock
it can read only Python and the system's libraries, and write only in its folder (sandbox_walls.py). Root's programs run
as another user.

This protects the machine from accidents. It can't contain programs that are written to break out, or to pretend that
they have passed: the answer to that is a virtual machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

PROCESS = Path(__file__).with_name("sandbox_process.py")
GRACE = 20.0
"""Seconds beyond the limit for the process that watches the program to start and to clean up."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
"""The whole environment: sets have the same order each time, and no extra thread counts as a process."""


@dataclass(frozen=True)
class Limits:
    cpu_seconds: int = 5
    seconds: int = 20
    """Wall-clock time: a program may sleep, or get little time on a busy machine."""
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    folder_bytes: int = 1 << 24
    files: int = 1000
    """Files and folders that it may have at a time; both are looked at twenty times a second."""
    processes: int = 4
    """Including threads and the program's own process."""

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ValueError("limits must be at least 1")


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str
    """`passed`, or one line on why not."""
    isolation: str
    """How the network was blocked: `namespaces`, or `guard` if it merely could not make sockets."""


LIMITS = Limits()


def run(program: str, limits: Limits = LIMITS, namespaces: bool = True) -> Verdict:
    """Whether the program finishes without an exception. Raises RuntimeError if it could not be tested.

    `namespaces`: whether to use them if the system allows it.
    """
    folder = tempfile.mkdtemp(prefix="kvq-sandbox-")
    try:
        task = json.dumps({"program": program, "folder": folder, "namespaces": namespaces, **asdict(limits)})
        # not -I: it would ignore PYTHONHASHSEED. Like -I, -P and -s exclude the folder and the user's packages
        command = [sys.executable, "-P", "-s", "-B", str(PROCESS)]
        watcher = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**ENVIRONMENT, "HOME": folder},
            start_new_session=True,
        )
        try:
            out, problem = watcher.communicate(task.encode(), timeout=limits.seconds + GRACE)
        except subprocess.TimeoutExpired:
            raise RuntimeError("a sandbox did not finish within its limit") from None
        finally:
            watcher.kill()
            watcher.wait()
    finally:
        _remove(folder)
    if watcher.returncode < 0:
        return Verdict(False, "it killed the process that watched it", "guard")
    try:
        return Verdict(**json.loads(out))
    except (ValueError, TypeError):
        said = problem.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"a program could not be tested in a sandbox: {said[-1]}") from None


def _remove(folder: str) -> None:
    """However deep it is and whatever its modes are: Python gives up on a thousand nested folders."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL)

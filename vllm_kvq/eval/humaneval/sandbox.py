"""Runs a program that a model wrote, in a process that can do little harm, and says whether it came to its end.

The process has a session of its own, no network, an empty environment, a temporary folder to write to, and limits on
processor time, memory, sizes of files and processes. Where Linux lets us make namespaces (as root, or where
unprivileged user namespaces are allowed) it has process numbers of its own, so that whatever it starts dies with it,
and no network interface. Elsewhere sockets are taken from it, and its descendants are looked for and killed. Where
Linux has Landlock it can write nowhere but in its folder. Root's programs run as another user.

This keeps accidents away from the machine. It is no prison for programs that are written to break out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

PROCESS = Path(__file__).with_name("sandbox_process.py")
GRACE = 20.0
"""Seconds beyond the limit that the process which watches the program has to start and to clean up."""
PASSED = "passed"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
"""All of it: the order of sets is the same each time, and no thread counts as a process more."""


@dataclass(frozen=True)
class Limits:
    cpu_seconds: int = 5
    seconds: int = 20
    """On the clock: a program may sleep, or a busy machine give it little time."""
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 4
    """And threads, the program's own process included."""

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ValueError("limits below 1 leave a program nothing")


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str
    """`passed`, or in a line why not."""
    isolation: str
    """How the network was kept away: `namespaces`, or `guard` where only sockets were taken from it."""


LIMITS = Limits()


def run(program: str, limits: Limits = LIMITS, namespaces: bool = True) -> Verdict:
    """Whether the program comes to its end without an exception. Raises RuntimeError where it could not be tried.

    `namespaces`: whether to make them where the system allows it.
    """
    with tempfile.TemporaryDirectory(prefix="kvq-sandbox-", ignore_cleanup_errors=True) as folder:
        task = json.dumps({"program": program, "folder": folder, "namespaces": namespaces, **asdict(limits)})
        # not -I: it would ignore PYTHONHASHSEED. -P and -s leave out the folder and the user's packages as that does
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
            raise RuntimeError("a sandbox did not end within its limit") from None
        finally:
            watcher.kill()
            watcher.wait()
    if watcher.returncode < 0:
        return Verdict(False, "it killed the process that watched it", "guard")
    try:
        return Verdict(**json.loads(out))
    except (ValueError, TypeError):
        said = problem.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"a program could not be tried in a sandbox: {said[-1]}") from None

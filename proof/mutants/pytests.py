"""pytest in a copy of the checkout; what it started is stopped with it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""pytest's exit statuses; all but the first two mean that nothing was tested."""
TIMEOUT = 1500.0
TIDY_SECONDS = 20.0
"""The time that an interrupted pytest gets to stop its servers."""


class Pytests:
    """Runs them, for several threads, until it is stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def __call__(self, root: Path, arguments: str) -> int:
        """The exit status of pytest in the tree at `root`, which its child processes import, too."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(arguments)]
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("VLLM_KVQ_CACHE", None)
        quiet = subprocess.DEVNULL
        with self._lock:
            if self._stopped:
                return INTERRUPTED
            # its own process group: Ctrl-C then reaches only us
            child = subprocess.Popen(command, cwd=root, env=environment, stdout=quiet, stderr=quiet, process_group=0)
            self._running.add(child)
        try:
            return child.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            end(child)
            return FAILED  # a test that hangs under a fault does not pass
        finally:
            with self._lock:
                self._running.discard(child)

    def stop(self) -> None:
        """End all of them; none is started any more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for child in running:
            end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """In order, so that fixtures stop what they have started; then by force, with all that descends from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(TIDY_SECONDS)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.kill()

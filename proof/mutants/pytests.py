"""pytest in a copy of the checkout; what it started is stopped with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from vllm_kvq.kernels import build

PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""pytest's exit statuses; all but the first two mean that nothing was tested."""
CRASHED = -signal.SIGSEGV
"""How pytest exits where a fault makes C++ touch what it must not (tests/kernels/guard_pages.py)."""
TIMEOUT = 1500.0
TIDY_SECONDS = 20.0
"""The time that an interrupted pytest gets to stop its servers."""
WARM = Path(__file__).with_name("warm.py")
COMPILER = Path(__file__).with_name("objects.py")
IMPORTED = ("hypothesis", "_pytest.main", "vllm.entrypoints.llm")
"""Modules whose third-party imports are done once for all pytests of a tree: instead of half a minute, seconds."""


class Tree:
    """One copy of the checkout, and the process that forks its pytests."""

    def __init__(self, root: Path, objects: Path) -> None:
        """`objects`: a folder for what compilers make of sources that faults leave as they are."""
        self._sources, self._objects = root / "csrc" / "cpu", objects
        self._built = build.sources_key(self._sources)
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),  # child processes import from it, too
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        environment.pop("VLLM_KVQ_CACHE", None)
        self._warm = subprocess.Popen(
            [sys.executable, str(WARM), *IMPORTED],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C then reaches only us
            bufsize=0,
        )
        self._pytest: int | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def __call__(self, arguments: str) -> int:
        assert self._warm.stdin is not None
        words = ["-q", "-x", "-p", "no:cacheprovider", *shlex.split(arguments)]
        with contextlib.suppress(BrokenPipeError):
            self._warm.stdin.write(json.dumps((words, self._compiler())).encode() + b"\n")
        pid = self._line()
        with self._lock:
            self._pytest = pid
            stopped = self._stopped
        try:
            if stopped or pid is None:
                self.stop()
                return INTERRUPTED
            if self._answers_within(TIMEOUT):
                status = self._line()
                return INTERRUPTED if status is None else status
            end(pid)
            self._line()
            return FAILED  # a test that hangs under a fault does not pass
        finally:
            with self._lock:
                self._pytest = None

    def _compiler(self) -> dict[str, str]:
        """Variables for a library that has to be compiled; none where the one that was copied serves."""
        if build.sources_key(self._sources) == self._built:
            return {}
        return {"CXX": " ".join([sys.executable, str(COMPILER), str(self._objects), *build.compiler()])}

    def _answers_within(self, seconds: float) -> bool:
        assert self._warm.stdout is not None
        return bool(select.select([self._warm.stdout], [], [], seconds)[0])

    def _line(self) -> int | None:
        """The next number that the process says; None once it has exited."""
        assert self._warm.stdout is not None
        text = self._warm.stdout.readline()
        return int(text) if text else None

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            pid = self._pytest
        if pid is not None:
            end(pid)
        self._warm.kill()
        self._warm.wait()


class Pytests:
    """Runs them, for several threads, each in a tree of its own, until it is stopped."""

    def __init__(self, objects: Path) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._trees: dict[Path, Tree] = {}
        self._stopped = False

    def __call__(self, root: Path, arguments: str) -> int:
        """The exit status of pytest in the tree at `root`."""
        with self._lock:
            if self._stopped:
                return INTERRUPTED
            tree = self._trees.get(root)
            if tree is None:
                tree = self._trees[root] = Tree(root, self._objects)
        return tree(arguments)

    def __enter__(self) -> Pytests:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all of them; no more are started."""
        with self._lock:
            self._stopped = True
        for tree in self._trees.values():
            tree.stop()


def end(pid: int) -> None:
    """Gently first, so that fixtures stop what they have started; then by force, with all that descends from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(pid)
        tree = child.children(recursive=True)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            child.wait(TIDY_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with what it has started since
        for process in (*tree, child):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

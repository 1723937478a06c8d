"""Commands that load vLLM, in processes forked from one that has loaded it, as are the engines and workers they start.

They are whole commands, which only leave out half a minute of imports. So they are for tests of what a command answers
and writes; that commands start from nothing, and end as users end them, is for tests with processes of their own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from proof.oracle.engines import forked
from vllm_kvq.bench.servers.server import Server
from vllm_kvq.eval.engine import engines
from vllm_kvq.integration.preview import apart


class WarmProcess(ForkServerProcess):
    """A process of multiprocessing, with all variables of the process that starts it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool | None = None) -> None:
        super().__init__(target=_with_variables, args=(dict(os.environ), target, args), daemon=daemon)

    def start(self) -> None:
        with forked._forked_from(forked._servers[False]):
            super().start()


class WarmContext(ForkServerContext):
    """For code that asks multiprocessing for a context in which it starts processes."""

    Process = WarmProcess


def _with_variables(variables: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(*arguments)


def warm_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation's engines come from that process, too, and what `apart` runs."""
    for module in (engines, apart):
        monkeypatch.setattr(module, "get_context", lambda _: WarmContext())


class Forked:
    """What is used of a `Popen`: function(*arguments) in a process whose output goes to a log."""

    def __init__(self, log: Path, variables: Mapping[str, str], function: Callable[..., None], *arguments: Any) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        self._process = WarmProcess(_begin, (str(log), dict(variables), function, arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.log), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def _begin(log: str, variables: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR may be different now
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # as in what a user starts
    from vllm import logger
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    logger._configure_vllm_root_logger()  # the process that this one is forked from is silent
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        function(*arguments)
    finally:
        # what Python does at the end of a command, and multiprocessing does not
        atexit.unregister(os._exit)
        atexit._run_exitfuncs()


def _vllm(arguments: list[str]) -> None:
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *arguments]
    main()


class ForkedServer(Server):
    """`vllm serve`."""

    def __enter__(self) -> ForkedServer:
        variables = {k: v for k, v in {**self.defaults, **os.environ}.items() if k not in self.without}
        self._child = Forked(self.log, variables, _vllm, self.arguments)  # type: ignore[assignment]
        return self

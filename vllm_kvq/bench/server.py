"""`vllm serve` as a child process: start it, wait until it is healthy, read its log, stop it cleanly."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar


class ServerError(Exception):
    """One sentence for the user; `log_tail` holds the lines that explain it."""

    def __init__(self, sentence: str, log_tail: Sequence[str] = ()):
        super().__init__(sentence)
        self.log_tail = tuple(log_tail)


def free_port(host: str) -> int:
    """A port on which nothing is listening at the moment."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def vllm_command() -> list[str]:
    """`vllm` in this Python's folder, else vLLM's module, where only PYTHONPATH knows it. ServerError without vLLM."""
    script = Path(sys.executable).parent / "vllm"
    if script.exists():
        return [str(script)]
    if find_spec("vllm") is None:
        raise ServerError("vLLM is not installed: install vllm-kvq with its extra `cpu` or `gpu`")
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


class Server:
    """Context manager around the child; leaving it always stops the child."""

    STOP_SECONDS = 20  # the engine's time with `--shutdown-timeout`; at 0, vLLM's default, it is killed
    KILL_SECONDS = STOP_SECONDS + 10  # the time after which we kill the child ourselves

    DEFAULTS: ClassVar = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    """Values for the child's environment, if the caller's does not set them."""

    def __init__(
        self, model: str, arguments: Sequence[str], host: str, port: int, log: Path, without: Sequence[str] = ()
    ):
        """`without`: variables that the child does not get, ours or the caller's."""
        self.url = f"http://{host}:{port}"
        self.log = log
        self.arguments = ["serve", model, "--host", host, "--port", str(port)]
        self.arguments += ["--shutdown-timeout", str(self.STOP_SECONDS), *arguments]
        self.command = [*vllm_command(), *self.arguments]
        self.without = frozenset(without)
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in {**self.DEFAULTS, **os.environ}.items() if k not in self.without}
        with self.log.open("wb") as log:
            # Its own process group: Ctrl-C then reaches only us, and we stop the child in order. Not its own session:
            # Linux divides processors among sessions, and one with a busy server can starve ours for seconds.
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def shown(self) -> str:
        """The command as a user would type it, with the memory for the cache on a CPU."""
        name = "VLLM_CPU_KVCACHE_SPACE"
        return f"{name}={os.environ.get(name, self.DEFAULTS[name])} {shlex.join(['vllm', *self.arguments])}"

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until_healthy(self, seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._raise_if_dead("before it was ready")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
                tick()
        raise ServerError(f"the server was not ready after {seconds:.0f} s", self._tail())

    def wait(self) -> None:
        """Waits until the child exits by itself, which it should not."""
        assert self._child is not None
        self._child.wait()
        self._raise_if_dead("")

    def stop(self) -> int:
        """SIGTERM, then SIGKILL for the whole group if that was ignored; returns the exit status."""
        child = self._child
        if child is None:
            return 0
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(self.KILL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return child.returncode

    def _raise_if_dead(self, when: str) -> None:
        assert self._child is not None
        status = self._child.poll()
        if status is not None:
            raise ServerError(f"the server exited with status {status} {when}".rstrip(), self._tail())

    def _tail(self, lines: int = 20) -> list[str]:
        return self.read_log().splitlines()[-lines:]

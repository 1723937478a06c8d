"""`vllm serve` as a child process: start it, wait until it is healthy, ask it, read its log, stop it cleanly."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

HOST = "127.0.0.1"
START_SECONDS = 600
DYING_SECONDS = 5
"""How long a server may still run after its engine has died and its clients know it."""
TAIL_LINES = 20


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
        self,
        model: str,
        arguments: Sequence[str],
        host: str,
        port: int,
        log: Path,
        without: Sequence[str] = (),
        defaults: Mapping[str, str] | None = None,
    ):
        """`without`: variables that the child does not get, ours or the caller's; `defaults`: these add to
        DEFAULTS, or replace them."""
        self.url = f"http://{host}:{port}"
        self.log = log
        self.arguments = ["serve", model, "--host", host, "--port", str(port)]
        self.arguments += ["--shutdown-timeout", str(self.STOP_SECONDS), *arguments]
        self.command = [*vllm_command(), *self.arguments]
        self.without = frozenset(without)
        self.defaults = {**self.DEFAULTS, **(defaults or {})}
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in {**self.defaults, **os.environ}.items() if k not in self.without}
        with self.log.open("wb") as log:
            # Its own process group: Ctrl-C then reaches only us, and we stop the child cleanly. Not its own session:
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
        return f"{name}={os.environ.get(name, self.defaults[name])} {shlex.join(['vllm', *self.arguments])}"

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until_healthy(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.raise_if_dead("before it was ready")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (OSError, HTTPException):
                time.sleep(0.5)
        raise ServerError(f"the server was not ready after {seconds:.0f} s", self.tail())

    def wait(self) -> None:
        """Waits until the child exits by itself, which it should not."""
        assert self._child is not None
        self._child.wait()
        self.raise_if_dead("")

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

    def raise_if_dead(self, when: str, seconds: float = 0) -> None:
        """ServerError if the child has exited, or does within these seconds."""
        assert self._child is not None
        try:
            status = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise ServerError(f"the server exited with status {status} {when}".rstrip(), self.tail())

    def tail(self) -> list[str]:
        """The end of the log."""
        return self.read_log().splitlines()[-TAIL_LINES:]


def with_cache(
    model: Path,
    dtype: str,
    max_len: int,
    log: Path,
    more: Sequence[str],
    options: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> Server:
    """A server as benchmarks start it: it computes in bfloat16, and clients call its model `bench`."""
    flags = ["--additional-config", json.dumps({"kvq": dict(options)})] if options else []
    flags += ["--kv-cache-dtype", dtype, "--dtype", "bfloat16", "--max-model-len", str(max_len)]
    flags += ["--served-model-name", "bench", *more]
    return Server(str(model), flags, HOST, free_port(HOST), log, without, defaults)


@contextmanager
def watched(*servers: Server) -> Iterator[None]:
    """Whatever fails while these servers are asked becomes a ServerError with the end of a log: that of the server that
    died, or of each server if none did."""
    try:
        yield
    except (ServerError, OSError, HTTPException) as error:
        for server in servers:
            server.raise_if_dead("while it was asked", DYING_SECONDS)
        if isinstance(error, ServerError):
            if error.log_tail:
                raise
            sentence = str(error)
        else:
            sentence = f"the server does not answer: {str(error) or type(error).__name__}"
        raise ServerError(sentence, [line for server in servers for line in server.tail()]) from error

"""Engines, or anything else of vLLM's, in processes forked from one that has imported vLLM already (`preload`)."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Self
from unittest import mock

from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.trace import Result, Trace

TIMEOUT, V2_TIMEOUT = 300.0, 1800.0
"""Seconds that a trace may take, with the runner for CPUs and with the interpreted one. An engine that takes longer has
failed."""
Prepare = Callable[[Any], None]
"""Called on a TracedEngine before its first trace; tests plant faults there."""


class EngineFailed(Exception):
    """The engine raised, died or did not answer in time; the message is the end of its output."""


OURS = "VLLM_KVQ_"


def _own() -> dict[str, str]:
    """The variables of this process that affect an engine; the server that forks it may have started with others."""
    return {name: value for name, value in os.environ.items() if name.startswith(OURS) or name == RUNNER}


def _server(preload: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([preload])
    return server


_servers = {False: _server("proof.oracle.engines.preload"), True: _server("proof.oracle.engines.preload_v2")}
"""By whether it is for the V2 runner: vLLM, once imported, has one model runner or the other. Neither is the server of
multiprocessing itself, which imports what its first user asked for."""
_starting = threading.Lock()


@contextmanager
def _forked_from(server: forkserver.ForkServer) -> Iterator[None]:
    """A process that starts here comes from that server."""
    with _starting, mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        yield


class _Forked:
    """A process that runs `serve(pipe, ...)`, and the other end of that pipe, which brings pairs (good, answer)."""

    def __init__(self, variables: Mapping[str, str], serve: Callable[..., None], *arguments: Any) -> None:
        handle, log = tempfile.mkstemp(prefix="kvq-engine-", suffix=".log")
        os.close(handle)
        self.log = Path(log)
        context = multiprocessing.get_context("forkserver")
        self.pipe, other = context.Pipe()
        variables = _own() | dict(variables)
        v2 = variables.get(RUNNER) == "1"
        self.timeout = V2_TIMEOUT if v2 else TIMEOUT
        self.process = context.Process(target=_begin, args=(other, log, variables, serve, arguments), daemon=True)
        with _forked_from(_servers[v2]):
            self.process.start()
        other.close()

    def answer(self) -> Any:
        try:
            if not self.pipe.poll(self.timeout):
                raise EngineFailed(f"no answer within {self.timeout:.0f} seconds")
            good, answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise EngineFailed(
                f"the engine's process died\n{self.log.read_text(errors='replace', encoding='utf-8')[-4000:]}"
            ) from None
        if not good:
            raise EngineFailed(answer)
        return answer

    def close(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineProcess(_Forked):
    """A TracedEngine that runs traces one after the other until it is closed or fails."""

    def __init__(
        self, model: str, arguments: Mapping[str, Any], variables: Mapping[str, str], prepare: Prepare | None = None
    ) -> None:
        super().__init__(variables, _serve_engine, model, dict(arguments), prepare)
        try:
            self.answer()
        except EngineFailed:
            self.close()
            raise

    def run(self, trace: Trace) -> Result:
        self.pipe.send(("run", trace))
        return self.answer()

    def call(self, function: Callable[[Any], Any]) -> Any:
        """function(engine) in the engine's process."""
        self.pipe.send(("call", function))
        return self.answer()


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in its own process."""
    with _Forked({}, _serve_call, function, arguments) as process:
        return process.answer()


def _begin(
    pipe: Any, log: str, variables: dict[str, str], serve: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(out, fd)
    for name in _own():
        del os.environ[name]
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    try:
        serve(pipe, *arguments)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other side has closed
    except BaseException:
        pipe.send((False, traceback.format_exc()[-4000:]))
    # the process exits here, without vLLM's own clean-up
    os._exit(0)


def _serve_engine(pipe: Any, model: str, arguments: dict[str, Any], prepare: Prepare | None) -> None:
    from proof.oracle.engines.engine import TracedEngine

    engine = TracedEngine(model, **arguments)
    if prepare is not None:
        prepare(engine)
    pipe.send((True, None))
    while True:
        what, argument = pipe.recv()
        pipe.send((True, engine.run(argument) if what == "run" else argument(engine)))


def _serve_call(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send((True, function(*arguments)))

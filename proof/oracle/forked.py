"""Engines in processes of their own, forked from one that has imported vLLM already (`preload`)."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proof.oracle.trace import Result, Trace

TIMEOUT = 300.0
"""Seconds that a trace may take; an engine that hangs is a finding too."""
Prepare = Callable[[Any], None]
"""Something done to the TracedEngine before its first trace; tests break and poison things there."""


class EngineFailed(Exception):
    """The engine raised, died or hung; the message is the end of what it said."""


OURS = "VLLM_KVQ_"


def _own() -> dict[str, str]:
    """This process's variables of ours. The process that engines are forked from has those of its own start."""
    return {name: value for name, value in os.environ.items() if name.startswith(OURS)}


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["proof.oracle.preload"])
    return context


class EngineProcess:
    """A TracedEngine that runs traces one after the other until it is closed or fails."""

    def __init__(
        self, model: str, arguments: Mapping[str, Any], variables: Mapping[str, str], prepare: Prepare | None = None
    ) -> None:
        handle, log = tempfile.mkstemp(prefix="kvq-engine-", suffix=".log")
        os.close(handle)
        self.log = Path(log)
        context = _context()
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(other, log, model, dict(arguments), _own() | dict(variables), prepare), daemon=True
        )
        self.process.start()
        other.close()
        try:
            self._answer()
        except EngineFailed:
            self.close()
            raise

    def run(self, trace: Trace) -> Result:
        self.pipe.send(("run", trace))
        return self._answer()

    def call(self, function: Prepare) -> Any:
        """function(engine) in the engine's process."""
        self.pipe.send(("call", function))
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self.pipe.poll(TIMEOUT):
                raise EngineFailed(f"no answer within {TIMEOUT:.0f} seconds")
            good, answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise EngineFailed(f"the engine's process died\n{self.log.read_text(errors='replace')[-4000:]}") from None
        if not good:
            raise EngineFailed(answer)
        return answer

    def close(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    pipe: Any,
    log: str,
    model: str,
    arguments: dict[str, Any],
    variables: dict[str, str],
    prepare: Prepare | None,
) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(out, fd)
    for name in _own():
        del os.environ[name]
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    from proof.oracle.engine import TracedEngine

    try:
        engine = TracedEngine(model, **arguments)
        if prepare is not None:
            prepare(engine)
        pipe.send((True, None))
        while True:
            what, argument = pipe.recv()
            pipe.send((True, engine.run(argument) if what == "run" else argument(engine)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other side has closed
    except BaseException:
        pipe.send((False, traceback.format_exc()[-4000:]))
    # no clean-up of vLLM's: the process ends here
    os._exit(0)

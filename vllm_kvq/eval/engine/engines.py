"""Engines in their own processes, one after the other, forked from a process that has already imported vLLM."""

from __future__ import annotations

import contextlib
import os
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

from vllm_kvq.eval.engine.jobs import Complete, Completed, EngineArguments, Generate, Score, Started
from vllm_kvq.eval.engine.logprobs import Logprobs
from vllm_kvq.eval.engine.worker import serve
from vllm_kvq.integration.preview.logs import last_line

PATIENCE = 5.0
"""Seconds that an idle engine is given to exit by itself."""


class EngineFailed(Exception):
    """One sentence on why the engine does not start, or why it exited."""


class Engine:
    """A running engine; raises EngineFailed if it does not start."""

    def __init__(self, arguments: EngineArguments) -> None:
        handle, log = tempfile.mkstemp(prefix="kvq-eval-", suffix=".log")
        os.close(handle)
        self._log = Path(log)
        context = get_context("forkserver")
        context.set_forkserver_preload(["vllm_kvq.eval.engine.preload"])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, log, dict(os.environ), arguments), daemon=True)
        self._process.start()
        other.close()
        try:
            self.started: Started = self._answer()
        except BaseException:
            self.close()
            raise

    def score(self, job: Score) -> Logprobs:
        found: Logprobs = self._ask(job)
        return found

    def generate(self, job: Generate) -> list[Logprobs]:
        found: list[Logprobs] = self._ask(job)
        return found

    def complete(self, job: Complete) -> list[Completed]:
        found: list[Completed] = self._ask(job)
        return found

    def _ask(self, job: Score | Generate | Complete) -> Any:
        with contextlib.suppress(ConnectionError):  # it has exited, and the answer says why
            self._pipe.send(job)
        return self._answer()

    def _answer(self) -> Any:
        try:
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            said = last_line(self._log) or "nothing in its log"
            raise EngineFailed(f"the engine's process exited without an error message: {said}") from None
        if not good:
            raise EngineFailed(answer)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

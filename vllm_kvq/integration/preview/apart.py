"""Work that needs an engine, in a process of its own: what vLLM prints goes to a log, and all memory is given back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import vllm_kvq.late_torch as torch
from vllm_kvq.integration.preview.logs import last_line


class Failed(Exception):
    """One sentence on why there is no result."""


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns there. Both are sent by pickle; the result is read with torch's `load`."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="kvq-apart-") as folder:
        process = context.Process(target=_work, args=(theirs, folder, work, arguments), daemon=True)
        process.start()
        theirs.close()
        try:
            problem: str | None = ours.recv()
        except (EOFError, ConnectionError):
            said = last_line(Path(folder, "log"))
            end = f"last log line: {said}" if said else "its log is empty"
            problem = f"vLLM's process exited without an error message; {end}"
        finally:
            process.join()
        if problem is not None:
            raise Failed(problem)
        return torch.load(Path(folder, "found"), weights_only=False)


def _work(pipe: Connection, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answers with None, or with a sentence on what went wrong."""
    log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(log, fd)
    # what is looked at must live where the model does
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm_kvq.integration.preview.dry_start import sentence_of

    try:
        torch.save(work(*arguments), Path(folder, "found"))
        pipe.send(None)
    except Exception as error:
        import traceback

        traceback.print_exc()
        pipe.send(sentence_of(error))

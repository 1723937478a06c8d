"""Imported once, by the server that engines are forked from (multiprocessing's forkserver)."""

from __future__ import annotations

import atexit
import os

from proof.oracle.engines.engine import EAGER, ENVIRONMENT
from proof.oracle.engines.warm import warm


def _silently() -> None:
    os.environ.update(ENVIRONMENT | EAGER)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kept = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nothing, fd)
        warm()
    except ImportError as error:
        raise RuntimeError("engines would start in a server that is not warm") from error  # it ignores ImportError
    finally:
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(nothing)


_silently()
# at its end Triton's library would list on stderr what it has not freed
atexit.register(os._exit, 0)

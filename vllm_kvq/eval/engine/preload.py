"""Imported once, by the server that engines are forked from (multiprocessing's forkserver)."""

from __future__ import annotations

import gc
import os

from vllm_kvq.eval.engine.worker import VARIABLES


def _silently() -> None:
    # read by OpenMP when it is loaded: a thread that waits must not keep a core busy, which another engine may need
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch reads one of them when it is imported
    os.environ.update(VARIABLES)
    kept = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nothing, fd)
        from vllm import LLM  # noqa: F401
        from vllm.platforms import current_platform

        from vllm_kvq.eval.engine import forced  # noqa: F401

        if current_platform.is_cpu():
            from vllm.v1.engine import core  # noqa: F401
            from vllm.v1.worker import cpu_worker  # noqa: F401
        # an engine's first garbage collections would visit, and so copy, all objects of these modules
        gc.collect()
        gc.freeze()
    finally:
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(nothing)


_silently()

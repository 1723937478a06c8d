"""Imported once, by the process that engines are forked from: an engine then starts in a few seconds."""

from __future__ import annotations

import os

from vllm_kvq.oracle.engine import ENVIRONMENT


def _import_everything() -> None:
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.model_executor.models import llama, registry  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # vLLM looks at each model class in a process of its own, for the sake of CUDA
    registry._run_in_subprocess = lambda function: function()


def _silently() -> None:
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kept = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nothing, fd)
        _import_everything()
    finally:
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(nothing)


_silently()

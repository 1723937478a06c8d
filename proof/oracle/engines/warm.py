"""One-time preparation of the process from which engines are forked: an engine then starts in a second or two."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from proof.oracle.engines.interpreted import keep_async_scheduling, v2_asked_for


def warm() -> None:
    with suppress(ImportError):  # 0.33 has it elsewhere
        import vllm.entrypoints.launchers.cli_args
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, EngineArgs, SamplingParams  # noqa: F401
    from vllm.model_executor.models import llama, registry  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if v2_asked_for():
        import_module("vllm.v1.worker.cpu.model_runner")
        keep_async_scheduling()
    # vLLM inspects each model class in a separate process, to avoid initialising CUDA here
    registry._run_in_subprocess = lambda function: function()
    # each worker would search all modules for Triton kernels that C++ replaces: two seconds
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    # Each engine would compile this again: ten seconds. (Imported late, because the search above fails on numba.)
    from vllm.v1.spec_decode import ngram_proposer

    ngram_proposer.batch_propose_numba.enable_caching()
    # a fork's first garbage collection would visit, and so copy, all objects of these modules
    gc.collect()
    gc.freeze()

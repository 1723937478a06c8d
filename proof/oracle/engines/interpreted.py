"""vLLM's V2 model runner, which is for CUDA, on a CPU: its Triton kernels under Triton's interpreter.

vLLM's CPU worker has that runner, but asks for a Triton with a backend for CPUs, which torch's Triton lacks. Here a
backend of that name says that it is active; nothing is compiled for it, because every kernel is interpreted.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from proof.interpreter import quicken

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's own variable: 1 chooses it."""
ENVIRONMENT = {
    RUNNER: "1",
    "TRITON_INTERPRET": "1",
    # else inductor, which compiles the model to C++, asks the backend what GPU it compiles for
    "TORCHINDUCTOR_TRITON_DISABLE_DEVICE_DETECTION": "1",
}


def v2_asked_for() -> bool:
    return os.environ.get(RUNNER) == "1"


def serve_v2() -> None:
    """To be called before vLLM is imported, which looks for Triton's backends then."""
    os.environ.update(ENVIRONMENT)
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    _mend_interpreter()


def _mend_interpreter() -> None:
    from triton.language import int1
    from triton.runtime import interpreter

    quicken()
    builder = interpreter.interpreter_builder
    splat = builder.create_splat

    def create_splat(shape: Any, arg: Any) -> Any:
        """A comparison's result keeps the type of what was compared, and spread over a block it is a block of
        numbers, which no load takes as a mask."""
        truth = arg.data.dtype == bool
        return splat(shape, interpreter.TensorHandle(arg.data, int1) if truth else arg)

    builder.create_splat = create_splat
    # the counters of a kernel's loops: vLLM's own kernels use them as numbers of Triton's
    interpreter.range = lambda *ends: map(_Index, range(*ends))


class _Index(int):
    def to(self, dtype: Any) -> _Index:
        return self


def keep_async_scheduling() -> None:
    """vLLM's CPU platform turns it off for every model runner; the V2 runner is made for it. To be called once vLLM and
    its plugins are loaded."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    update = platform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    platform.check_and_update_config = staticmethod(check_and_update_config)

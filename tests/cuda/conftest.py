"""The CUDA source on CPU tensors: lanes are fibers, matrix products are software (csrc/cuda/emulate.h)."""

from one_thread import one_thread

from proof.interpreter import quicken
from vllm_kvq.kernels.gpu import loading

loading.load()  # parts are merged by Triton's kernel, under its interpreter
if loading.interpreted():
    quicken()

__all__ = ["one_thread"]

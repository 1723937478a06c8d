"""Which of vLLM's own CPU builds the benchmark compares with.

vLLM's wheel holds its kernels three times: for AVX-512 with BF16, AVX-512, and AVX2. It takes the best one for the
processor; where our kernels are held to AVX2 ($VLLM_KVQ_ISA=avx2), its query for AVX-512 is answered with no.
"""

from __future__ import annotations

import functools
import os

import torch

BASELINES = {"bf16": "auto", "fp8": "fp8"}
"""Name -> vLLM's cache dtype."""


def on_avx2() -> bool:
    return os.environ.get("VLLM_KVQ_ISA") == "avx2" or not torch.cpu._is_avx512_supported()


@functools.cache
def load() -> None:
    """Registers vLLM's operators."""
    if on_avx2():
        torch.cpu._is_avx512_supported = lambda: False
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def baselines() -> dict[str, str]:
    """Cache types that the build can attend to: the one for AVX2 has no fp8."""
    return {name: dtype for name, dtype in BASELINES.items() if name != "fp8" or not on_avx2()}

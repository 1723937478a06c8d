"""Selects the one of vLLM's own CPU builds with which the benchmark compares.

vLLM's wheel contains its kernels three times: for AVX-512 with BF16, AVX-512, and AVX2. It takes the best one for the
processor; if our kernels are limited to AVX2 ($VLLM_KVQ_ISA=avx2), it is told that there is no AVX-512 and no AMX.
"""

from __future__ import annotations

import functools
import os

import torch

from vllm_kvq.integration import cpu_attention
from vllm_kvq.integration.patches.registered.own_sources import hide_own_sources

BASELINES = {"bf16": "auto", "fp8": "fp8"}
"""Name -> vLLM's cache dtype."""


def on_avx2() -> bool:
    return os.environ.get("VLLM_KVQ_ISA") == "avx2" or not torch.cpu._is_avx512_supported()


@functools.cache
def load() -> None:
    """Registers vLLM's operators; raises AMXError if they can't run here."""
    if on_avx2():
        torch.cpu._is_avx512_supported = torch.cpu._is_amx_tile_supported = lambda: False
    hide_own_sources()
    cpu_attention.prepare()


def why_not() -> str | None:
    """Why vLLM's attention can't be measured here."""
    try:
        load()
    except cpu_attention.AMXError as error:
        return f"{error}; VLLM_KVQ_ISA=avx2 compares with vLLM's build for AVX2, which does without"
    return None


def no_kernel(head_size: int) -> str | None:
    """Why vLLM's CPU attention can't be measured at all with heads of this size."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if head_size in (known := CPUAttentionBackend.get_supported_head_sizes()):
        return None
    return f"vLLM's CPU attention has no heads of {head_size} channels; it has {', '.join(map(str, known))}"


def no_fp8(head_size: int) -> str | None:
    """Why vLLM's CPU attention has no fp8 cache to compare with."""
    if on_avx2():
        return "vLLM's build for AVX2 has no fp8 cache"
    if head_size % 32:
        return f"vLLM's CPU attention has no fp8 cache at head size {head_size}"
    return None


def baselines(head_size: int) -> dict[str, str]:
    """Cache types that vLLM can attend to here."""
    return {name: dtype for name, dtype in BASELINES.items() if name != "fp8" or no_fp8(head_size) is None}

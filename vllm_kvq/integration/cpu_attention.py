"""vLLM's CPU attention where no engine has prepared it: in benchmarks, and for prompts before an engine's own."""

from __future__ import annotations

import functools

import torch


class AMXError(RuntimeError):
    """A sentence: the processor has AMX, vLLM's kernel would use it, and Linux kills a process that does."""


@functools.cache
def prepare() -> None:
    """Must have been called before any of vLLM's attention operators is."""
    # Linux has a process ask before its first AMX instruction, which otherwise raises SIGILL
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise AMXError("Linux denies this process AMX, which vLLM's CPU attention uses on this processor")
    # its wheel holds one library per processor, and a second one can't be loaded
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        from vllm.platforms import current_platform

        current_platform.import_kernels()

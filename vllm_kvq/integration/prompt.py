"""Causal attention of new tokens that nothing precedes: vLLM's own CPU kernel, over a scratch cache.

It knows the processor (AMX, AVX-512, NEON) better than PyTorch's attention, which takes more than twice as long, and a
prompt then costs what it costs without us. It returns no log-sum-exp, so a chunk with history can't use it.
"""

from __future__ import annotations

import functools

import torch

BLOCK = 128


@functools.cache
def _register_operators() -> None:
    """vLLM's engine has done so; its wheel holds one library per processor, and a second one can't be loaded."""
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        from vllm.platforms import current_platform

        current_platform.import_kernels()


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """query (n, q, Hq, d), key and value (n, q, H, d) -> (n, q, Hq, d)."""
    if query.device.type != "cpu":
        by_head = (x.transpose(1, 2) for x in (query, key, value))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(*by_head, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    _register_operators()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    n, q, query_heads, d = query.shape
    heads, dtype = key.shape[2], query.dtype
    isa, blocks = _get_attn_isa(dtype, BLOCK, d), -(-q // BLOCK)
    cache = torch.empty(n * blocks, heads, 2 * BLOCK, d, dtype=dtype)
    cache[blocks - 1 :: blocks] = 0  # what lies behind a request's end is read, though not used
    keys, values = cache.chunk(2, dim=2)
    table = torch.arange(n * blocks, dtype=torch.int32).view(n, blocks)
    slots = (BLOCK * blocks * torch.arange(n)[:, None] + torch.arange(q)).flatten()
    ops.cpu_attn_reshape_and_cache(key.flatten(0, 1), value.flatten(0, 1), keys, values, slots, isa)
    starts = q * torch.arange(n + 1, dtype=torch.int32)
    lengths = torch.full((n,), q, dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        n, query_heads, heads, d, lengths, dtype, starts, True, -1, isa, True
    )
    out = torch.empty(n * q, query_heads, d, dtype=dtype)
    ops.cpu_attention_with_kv_cache(
        *(query.flatten(0, 1), keys, values, out, starts, lengths, scale, True, None, -1, table, 0.0, schedule, None)
    )
    return out.view(n, q, query_heads, d)

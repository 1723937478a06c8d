"""Attention over the plain tokens of prompts: one table of who may do it, and the first that can does.

What lies before a chunk is merged with it by its log-sum-exp. The GPU's path merges always; steps that are planned on
the host ask only for prompts that nothing precedes, and attend later chunks with kernels of their own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from vllm_kvq.integration import cpu_attention
from vllm_kvq.kernels.step import Prompts
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.attend import Partial

logger = init_logger("vllm.kvq")

BLOCK = 128
"""Tokens of a block of the scratch cache that vLLM's CPU attention reads."""


@dataclass(frozen=True)
class Asked:
    device: torch.device
    dtype: torch.dtype
    head_size: int
    merged: bool
    """Whether the log-sum-exp is needed."""
    capped: bool = False
    """Whether scores have a soft cap."""


@dataclass(frozen=True)
class Choice:
    name: str
    why_not: Callable[[Asked], str | None]
    """Why it can't serve what is asked."""
    prompts: Prompts


def _cpu_why_not(asked: Asked) -> str | None:
    if asked.device.type != "cpu":
        return f"not for {asked.device.type}"
    return "it returns no log-sum-exp" if asked.merged else None


def _cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, None]:
    """vLLM's own CPU kernel, over a scratch cache: it knows the processor (AMX, AVX-512, NEON) better than PyTorch's,
    which takes more than twice as long, and a prompt costs what it costs without us. Prompts of one length."""
    cpu_attention.prepare()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    n, q, query_heads, d = len(lengths), lengths[0], query.shape[1], query.shape[2]
    heads, dtype = key.shape[1], query.dtype
    isa, blocks = _get_attn_isa(dtype, BLOCK, d), -(-q // BLOCK)
    cache = torch.empty(n * blocks, heads, 2 * BLOCK, d, dtype=dtype)
    cache[blocks - 1 :: blocks] = 0  # what lies past a request's end is read, though not used
    keys, values = cache.chunk(2, dim=2)
    table = torch.arange(n * blocks, dtype=torch.int32).view(n, blocks)
    slots = (BLOCK * blocks * torch.arange(n)[:, None] + torch.arange(q)).flatten()
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
    ends = torch.full((n,), q, dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(n, query_heads, heads, d, ends, dtype, start, True, -1, isa, True)
    out = torch.empty(n * q, query_heads, d, dtype=dtype)
    ops.cpu_attention_with_kv_cache(
        *(query, keys, values, out, start, ends, scale, True, None, -1, table, cap, schedule, None)
    )
    return out, None


def _half_on_cuda(asked: Asked) -> str | None:
    if asked.device.type != "cuda":
        return "no CUDA device"
    return None if asked.dtype in (torch.float16, torch.bfloat16) else f"{asked.dtype} is not a 16-bit type"


def _flash_why_not(asked: Asked) -> str | None:
    if problem := _half_on_cuda(asked):
        return problem
    from vllm.v1.attention.backends import fa_utils

    if not fa_utils.is_flash_attn_varlen_func_available():
        return "this vLLM has none"
    known = fa_utils.get_flash_attn_version(head_size=asked.head_size)
    return None if known else f"none for heads of {asked.head_size}"


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    cap: float = 0.0,
) -> Partial:
    from vllm.v1.attention.backends import fa_utils

    total, longest = sum(lengths), max(lengths)
    out, lse = fa_utils.flash_attn_varlen_func(
        *(x[:total] for x in (query, key, value)),
        max_seqlen_q=longest,
        cu_seqlens_q=start,
        max_seqlen_k=longest,
        cu_seqlens_k=start,
        softmax_scale=scale,
        softcap=cap,
        causal=True,
        return_softmax_lse=True,
        fa_version=fa_utils.get_flash_attn_version(head_size=query.shape[-1]),
    )[:2]
    return out, lse.transpose(0, 1)  # (Hq, T) there


def _flash_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float = 0.0
) -> Partial:
    from vllm.v1.attention.backends import fa_utils

    # made on the device: a copy from the host would wait for it
    ends = {
        f"cu_seqlens_{x}": torch.arange(2, dtype=torch.int32, device=y.device) * len(y)
        for x, y in (("q", query), ("k", key))
    }
    out, lse = fa_utils.flash_attn_varlen_func(
        *(query, key, value),
        max_seqlen_q=len(query),
        max_seqlen_k=len(key),
        **ends,
        softmax_scale=scale,
        softcap=cap,
        causal=False,
        return_softmax_lse=True,
        fa_version=fa_utils.get_flash_attn_version(head_size=query.shape[-1]),
    )[:2]
    return out, lse.transpose(0, 1)


def _xformers_why_not(asked: Asked) -> str | None:
    if problem := _half_on_cuda(asked):
        return problem
    if asked.capped:
        return "it knows no soft cap"
    return None if importlib.util.find_spec("xformers") else "xformers is not installed (extra 'xformers')"


def _xformers(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    cap: float = 0.0,
) -> Partial:
    from xformers.ops import fmha

    if cap:
        raise ValueError("xFormers knows no soft cap")
    total, heads = sum(lengths), key.shape[1]
    q = query[:total].unflatten(1, (heads, -1))[None]  # (1, T, H, g, d)
    k, v = (x[:total][None, :, :, None].expand(q.shape) for x in (key, value))
    mask = fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens([n for n in lengths if n])
    out, lse = fmha.memory_efficient_attention_partial(q, k, v, attn_bias=mask, scale=scale)
    return out[0].flatten(1, 2), lse[0].flatten(0, 1)[:, :total].transpose(0, 1)


def _xformers_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float = 0.0
) -> Partial:
    from xformers.ops import fmha

    if cap:
        raise ValueError("xFormers knows no soft cap")
    q = query.unflatten(1, (key.shape[1], -1))[None]  # (1, T, H, g, d)
    k, v = (x[None, :, :, None].expand(-1, -1, -1, q.shape[3], -1) for x in (key, value))
    out, lse = fmha.memory_efficient_attention_partial(q, k, v, scale=scale)
    return out[0].flatten(1, 2), lse[0].flatten(0, 1)[:, : len(query)].transpose(0, 1)


CHOICES = (
    Choice("vLLM's CPU attention", _cpu_why_not, Prompts(_cpu)),
    Choice("vLLM's flash attention", _flash_why_not, Prompts(_flash, _flash_whole)),
    Choice("xFormers", _xformers_why_not, Prompts(_xformers, _xformers_whole)),
    Choice("PyTorch's SDPA", lambda asked: None, Prompts(attend.causal, attend.whole)),
)


def choice_for(asked: Asked) -> Choice:
    """The first choice without a problem."""
    return next(choice for choice in CHOICES if choice.why_not(asked) is None)


@functools.cache
def prompts_for(asked: Asked) -> Prompts:
    """The first choice without a problem; the log says which, and why not the ones before it."""
    chosen = choice_for(asked)
    passed = [f"{choice.name}: {choice.why_not(asked)}" for choice in CHOICES[: CHOICES.index(chosen)]]
    logger.info("kvq: prompts are attended by %s%s", chosen.name, f" ({'; '.join(passed)})" if passed else "")
    return chosen.prompts

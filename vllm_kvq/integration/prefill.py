"""Causal attention among the new tokens of prompts on a GPU: one table of who may do it, the first that can does.

Every entry returns the log-sum-exp, too, because what lies before the chunk is merged with it. None of the GPU entries
has run on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from vllm_kvq.kernels.torch.attend import Partial

logger = init_logger("vllm.kvq")


@dataclass(frozen=True)
class Choice:
    name: str
    problem: Callable[[torch.device, torch.dtype, int], str | None]
    """(device, dtype, head size) -> why it can't serve them."""
    attend: Callable[..., Partial]
    """(query, key, value, query_start, lengths, scale) -> out (T, Hq, d), lse (T, Hq)."""


def _half_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "no CUDA device"
    return None if dtype in (torch.float16, torch.bfloat16) else f"{dtype} is not a 16-bit type"


def _flash_problem(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    if problem := _half_on_cuda(device, dtype):
        return problem
    from vllm.v1.attention.backends import fa_utils

    if not fa_utils.is_flash_attn_varlen_func_available():
        return "this vLLM has none"
    return None if fa_utils.get_flash_attn_version(head_size=head_size) else f"none for heads of {head_size}"


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
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
        causal=True,
        return_softmax_lse=True,
        fa_version=fa_utils.get_flash_attn_version(head_size=query.shape[-1]),
    )[:2]
    return out, lse.transpose(0, 1)  # (Hq, T) there


def _xformers_problem(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    if problem := _half_on_cuda(device, dtype):
        return problem
    return None if importlib.util.find_spec("xformers") else "xformers is not installed (extra 'xformers')"


def _xformers(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
) -> Partial:
    from xformers.ops import fmha

    total, heads = sum(lengths), key.shape[1]
    q = query[:total].unflatten(1, (heads, -1))[None]  # (1, T, H, g, d)
    k, v = (x[:total][None, :, :, None].expand(q.shape) for x in (key, value))
    mask = fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens([n for n in lengths if n])
    out, lse = fmha.memory_efficient_attention_partial(q, k, v, attn_bias=mask, scale=scale)
    return out[0].flatten(1, 2), lse[0].flatten(0, 1)[:, :total].transpose(0, 1)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
) -> Partial:
    """One prompt at a time, by PyTorch's memory-efficient kernel, which tells the log-sum-exp."""
    share = query.shape[1] // key.shape[1]
    outs, lses, at = [], [], 0
    for n in lengths:
        if not n:
            continue
        q, k, v = (x[at : at + n].transpose(0, 1)[None] for x in (query, key, value))
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        if query.is_cuda:
            got = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)
        else:
            got = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        outs.append(got[0][0].transpose(0, 1))
        lses.append(got[1][0, :, :n].transpose(0, 1))  # rows padded to 32 there
        at += n
    return torch.cat(outs), torch.cat(lses)


CHOICES = (
    Choice("vLLM's flash attention", _flash_problem, _flash),
    Choice("xFormers", _xformers_problem, _xformers),
    Choice("PyTorch's SDPA", lambda device, dtype, head_size: None, _sdpa),
)


@functools.cache
def prefill_for(device: torch.device, dtype: torch.dtype, head_size: int) -> Callable[..., Partial]:
    """The first choice without a problem; the log says which, and why not the ones before it."""
    passed = []
    for choice in CHOICES:
        problem = choice.problem(device, dtype, head_size)
        if problem is None:
            break
        passed.append(f"{choice.name}: {problem}")
    logger.info("kvq: prompts are attended by %s%s", choice.name, f" ({'; '.join(passed)})" if passed else "")
    return choice.attend

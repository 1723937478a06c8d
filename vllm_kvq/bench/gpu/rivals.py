"""The kernels that decode steps are compared with: attention over bf16 and over fp8.

    sdpa         torch's attention, by the kernel that it chooses
    sdpa-flash   torch's attention, by FlashAttention only
    flash_attn   the package flash_attn
    vllm-fa3     FlashAttention 3 over pages of 16 tokens, as vLLM serves a bf16 cache on Hopper
    fp8          the same over fp8, with queries in fp8, as vLLM serves an fp8 cache; else flash_attn_interface

A kernel that is not installed is left out. Keys and values are random: only the time matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_kvq.bench.gpu.decode import HEAD, HEADS, SHARE, Calls, Shape, bf16_bytes, measure, rotations
from vllm_kvq.bench.gpu.results import NoTime, Results

VLLM_PAGE = 16
Caches = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values, (batch, tokens, KV heads, channels)."""


def rivals(shape: Shape, device: torch.device, results: Results) -> tuple[dict[str, float], float | None]:
    """Seconds of the kernels that attend bf16, by name, and of the one that attends fp8. NoTime without any."""
    at, full = (shape.batch, shape.context), bf16_bytes(shape)
    kept = {name: row.seconds for name in BF16 if (row := results.known(name, *at))}
    caches: Caches = []

    def timed(name: str) -> tuple[float, int]:
        caches[:] = caches or random_caches(shape, full, torch.bfloat16, device)
        return measure(BF16[name](shape, caches), device), full

    for name in [n for n in BF16 if n not in kept]:
        try:
            kept[name] = results.take(name, *at, lambda name=name: timed(name)).seconds  # type: ignore[misc]
        except ImportError:
            continue
        except NoTime:
            if not kept:
                raise
        except (RuntimeError, AssertionError, AttributeError) as error:  # a kernel that refuses this GPU or shape
            results.note(f"{name}: {str(error).splitlines()[0]}")
    caches.clear()
    try:
        eight = results.take("fp8", *at, lambda: (measure(fp8_calls(shape, device), device), full // 2)).seconds
    # no time; or no FlashAttention 3, or it does not support this GPU, or has another version
    except (NoTime, ImportError, RuntimeError, AssertionError, AttributeError, TypeError):
        eight = None
    return kept, eight


def random_caches(shape: Shape, read: int, dtype: torch.dtype, device: torch.device) -> Caches:
    """As many caches as are rotated if one launch reads `read` bytes."""
    size = (shape.batch, shape.context, HEADS, HEAD)

    def random() -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16).to(dtype)

    return [(random(), random()) for _ in range(rotations(read, device))]


def _query(shape: Shape, like: torch.Tensor) -> torch.Tensor:
    """(batch, 1, query heads, channels)."""
    size = (shape.batch, 1, HEADS * SHARE, HEAD)
    return torch.randn(size, device=like.device, dtype=torch.bfloat16).to(like.dtype)


def _sdpa_calls(shape: Shape, caches: Caches) -> Calls:
    query = _query(shape, caches[0][0]).transpose(1, 2)

    def call(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        # torch wants each head's tokens together; the same bytes are as good, because they are random
        k, v = (x.view(shape.batch, HEADS, shape.context, HEAD) for x in (k, v))
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    return [call(k, v) for k, v in caches]


def _sdpa_flash_calls(shape: Shape, caches: Caches) -> Calls:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if caches[0][0].device.type != "cuda":
        raise ImportError("only for GPUs")

    def only_flash(inner: Callable[[], object]) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return inner()

        return call

    return [only_flash(call) for call in _sdpa_calls(shape, caches)]


def _package_calls(shape: Shape, caches: Caches) -> Calls:
    from flash_attn import flash_attn_with_kvcache

    query = _query(shape, caches[0][0])
    return [lambda k=k, v=v: flash_attn_with_kvcache(query, k, v) for k, v in caches]  # type: ignore[misc]


def _vllm_calls(shape: Shape, caches: Caches) -> Calls:
    if caches[0][0].device.type != "cuda":
        raise ImportError("only for GPUs")
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    first = caches[0][0]
    batch, device = shape.batch, first.device
    pages = -(-shape.context // VLLM_PAGE)
    lengths = torch.full((batch,), shape.context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    sizes = (batch, 1, shape.context, HEADS * SHARE, HEADS, HEAD, lengths)
    # vLLM computes it once per step, for all layers
    plan = get_scheduler_metadata(
        *sizes, qkv_dtype=first.dtype, cu_seqlens_q=starts, page_size=VLLM_PAGE, causal=True, num_splits=0
    )
    more: dict[str, Any] = {"fa_version": 3, "causal": True, "scheduler_metadata": plan, "num_splits": 0}
    if first.dtype == torch.float8_e4m3fn:
        one = torch.ones(batch, HEADS, device=device)
        more |= {f"{x}_descale": one for x in "qkv"}
    query = _query(shape, first).flatten(0, 1)

    def call(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        table = torch.randperm(batch * pages, device=device).to(torch.int32).view(batch, pages)
        k, v = (x.view(batch * pages, VLLM_PAGE, HEADS, HEAD) for x in (k, v))
        lens = {"max_seqlen_q": 1, "max_seqlen_k": shape.context, "cu_seqlens_q": starts, "seqused_k": lengths}
        return lambda: flash_attn_varlen_func(query, k, v, **lens, block_table=table, **more)

    return [call(k, v) for k, v in caches]


BF16: dict[str, Callable[[Shape, Caches], Calls]] = {
    "sdpa": _sdpa_calls,
    "sdpa-flash": _sdpa_flash_calls,
    "flash_attn": _package_calls,
    "vllm-fa3": _vllm_calls,
}


def fp8_calls(shape: Shape, device: torch.device) -> Calls:
    """FlashAttention 3 over fp8; ImportError if it is not installed."""
    caches = random_caches(shape, bf16_bytes(shape) // 2, torch.float8_e4m3fn, device)
    try:
        return _vllm_calls(shape, caches)
    except ImportError:
        pass
    from flash_attn_interface import flash_attn_with_kvcache

    query = _query(shape, caches[0][0])
    one = torch.ones(shape.batch, HEADS, device=device)
    scales = {f"{x}_descale": one for x in "qkv"}
    return [lambda k=k, v=v: flash_attn_with_kvcache(query, k, v, **scales) for k, v in caches]  # type: ignore[misc]

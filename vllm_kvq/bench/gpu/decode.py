"""Decode steps on a GPU: attention over packed pages, over bf16 and over fp8, and the copy bandwidth.

Every measurement replays a CUDA graph of several launches on rotated page tables (and rotated K and V), so that
together they read more than the cache holds; the median replay counts. The kernels that attend bf16 are torch's SDPA
with its own choice, SDPA limited to its FlashAttention backend, and the package flash_attn if installed. fp8 is
attended by FlashAttention 3 (the package flash_attn_interface, on Hopper); torch can't attend fp8 keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_kvq.bench.gpu.results import Results

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
HEADS, SHARE, HEAD, N = 8, 4, 128, 64
ROTATED_BYTES = 512 << 20
RIVALS = ("sdpa", "sdpa-flash", "flash_attn")
"""The kernels that attend bf16."""
Calls = list[Callable[[], object]]


def formats() -> Iterator[str]:
    """The formats for users that have GPU kernels."""
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.formats.table import suite
    from vllm_kvq.kernels.gpu.step import kernels_of

    for name in suite("public"):
        fmt = get_format(name).bind(Geometry(HEAD, N))
        if kernels_of(fmt) is not None:
            yield name


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int


def measure(calls: list[Callable[[], object]], device: torch.device, replays: int = 20) -> float:
    """Median seconds per call: of replays of one graph of all calls, or of plain calls if there is no GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    for call in calls:  # compiles, and fills the allocator
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    size = 1 << (30 if device.type == "cuda" else 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / measure([lambda: target.copy_(source)] * 2, device)


def packed_calls(name: str, shape: Shape, device: torch.device) -> tuple[Calls, int]:
    """Launches over rotated tables, and the bytes that one launch reads."""
    from vllm_kvq.bench.pools import random_pages
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.step import kernels_of

    fmt = get_format(name).bind(Geometry(HEAD, N))
    kernels = kernels_of(fmt)
    assert kernels is not None
    each = shape.batch * -(-shape.context // N)
    read = each * HEADS * fmt.record_bytes
    rounds = rotations(read, device)
    pool = random_pages(fmt, 1, HEADS)[1:].to(device).repeat(rounds * each, 1, 1)
    order = torch.randperm(rounds * each, device=device).to(torch.int32)
    tables = order.view(rounds, shape.batch, -1)
    query = torch.randn(shape.batch, 1, HEADS * SHARE, HEAD, device=device, dtype=torch.bfloat16)
    low = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    high = torch.full_like(low, shape.context)

    def launch(table: torch.Tensor) -> Callable[[], object]:
        return lambda: kernels.attend_table(fmt, query, pool, table, low, high, HEAD**-0.5)

    return [launch(t) for t in tables], read


def bf16_calls(shape: Shape, device: torch.device) -> dict[str, Calls]:
    """Launches over rotated bf16 K and V, by the kernel that attends them."""
    query = torch.randn(shape.batch, HEADS * SHARE, 1, HEAD, device=device, dtype=torch.bfloat16)
    size = (shape.batch, HEADS, shape.context, HEAD)
    rounds = rotations(bf16_bytes(shape), device)
    caches = [tuple(torch.randn(size, device=device, dtype=torch.bfloat16) for _ in "kv") for _ in range(rounds)]
    attention = torch.nn.functional.scaled_dot_product_attention

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        return lambda: attention(query, k, v, enable_gqa=True)

    found = {"sdpa": [sdpa(k, v) for k, v in caches]}
    if device.type != "cuda":
        return found
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def flash(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return attention(query, k, v, enable_gqa=True)

        return call

    found["sdpa-flash"] = [flash(k, v) for k, v in caches]
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return found
    rows = query.transpose(1, 2)

    def package(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        return lambda: flash_attn_with_kvcache(rows, k.view(_by_token(k)), v.view(_by_token(v)))

    return found | {"flash_attn": [package(k, v) for k, v in caches]}


def fp8_calls(shape: Shape, device: torch.device) -> Calls:
    """FlashAttention 3 over fp8 K and V of (batch, tokens, heads, channels); ImportError if it is not installed."""
    from flash_attn_interface import flash_attn_with_kvcache

    eight = torch.float8_e4m3fn
    query = torch.randn(shape.batch, 1, HEADS * SHARE, HEAD, device=device).to(eight)
    size = (shape.batch, shape.context, HEADS, HEAD)
    one = torch.ones(shape.batch, HEADS, device=device)
    scales = {f"{x}_descale": one for x in "qkv"}
    rounds = rotations(bf16_bytes(shape) // 2, device)
    half = torch.bfloat16
    caches = [tuple(torch.randn(size, device=device, dtype=half).to(eight) for _ in "kv") for _ in range(rounds)]

    def call(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        return lambda: flash_attn_with_kvcache(query, k, v, **scales)

    return [call(k, v) for k, v in caches]


def _by_token(x: torch.Tensor) -> tuple[int, ...]:
    """The same bytes as (batch, tokens, heads, channels): they are random, because only the time matters."""
    return (x.shape[0], x.shape[2], x.shape[1], x.shape[3])


def bf16_bytes(shape: Shape) -> int:
    return shape.batch * shape.context * HEADS * HEAD * 4


def rotations(read: int, device: torch.device) -> int:
    return min(32, max(1, ROTATED_BYTES // read)) if device.type == "cuda" else 1


def fits(read: int, device: torch.device) -> bool:
    return device.type != "cuda" or 1.2 * max(read, ROTATED_BYTES) < torch.cuda.mem_get_info()[0]


def packed(name: str, shape: Shape, device: torch.device) -> tuple[float, int]:
    calls, read = packed_calls(name, shape, device)
    took = measure(calls, device)
    del calls
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return took, read


def rivals(shape: Shape, device: torch.device, results: Results) -> tuple[dict[str, float], float | None]:
    """Seconds of the kernels that attend bf16, by name, and of the one that attends fp8."""
    at, full = (shape.batch, shape.context), bf16_bytes(shape)
    kept = {name: row.seconds for name in RIVALS if (row := results.known(name, *at))}
    if not kept:
        for name, calls in bf16_calls(shape, device).items():
            try:
                took = measure(calls, device)
            except RuntimeError as error:  # a backend that refuses these shapes
                results.tell(f"{name}: {str(error).splitlines()[0]}")
                continue
            kept[name] = results.take(name, *at, lambda took=took: (took, full)).seconds  # type: ignore[misc]
        del calls
    try:
        eight = results.take("fp8", *at, lambda: (measure(fp8_calls(shape, device), device), full // 2)).seconds
    # no FlashAttention 3, or it does not support this GPU, or has another version
    except (ImportError, RuntimeError, TypeError):
        eight = None
    return kept, eight

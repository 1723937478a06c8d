"""Decode steps on a GPU: attention over packed pages, over bf16 and over fp8, and the copy bandwidth.

Every measurement replays a CUDA graph of several launches on rotated page tables (and rotated K and V), so that
together they read more than the cache holds; the median replay counts. rivals.py has the kernels to compare with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
HEADS, SHARE, HEAD, N = 8, 4, 128, 64
ROTATED_BYTES = 512 << 20
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
    from vllm_kvq.bench.pools import calibrated, random_pages
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.step import kernels_of

    fmt = calibrated(get_format(name).bind(Geometry(HEAD, N)), HEADS)
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

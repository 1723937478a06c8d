"""Decode times of the Triton and CUDA kernels on a GPU, against attention over bf16 and against the copy bandwidth.

    python3 -m vllm_kvq.bench.gpu                      32 query heads on 8 KV heads of 128 channels
    python3 -m vllm_kvq.bench.gpu --dry-run            tiny shapes without a GPU (interpreter, emulation): no meaning

Every measurement replays a CUDA graph of several launches on rotated page tables (and rotated K and V), so that
together they read more than the cache holds; the median replay counts. bf16 is the fastest of torch's SDPA as it
chooses, SDPA held to its FlashAttention backend, and the package flash_attn where it is installed; each has its row.
"ideal" is the time in which bf16 K and V could be copied: no bf16 kernel is faster. torch attends no fp8 keys and
values: fp8 is not measured, and half of "ideal" bounds it. No GPU has run this yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FORMATS = ("squat2", "qjl3", "innerq2", "polar4", "polar3", "squat4")
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
HEADS, SHARE, HEAD, N = 8, 4, 128, 64
ROTATED_BYTES = 512 << 20
ROW = "{:<10} {:>5} {:>8} {:>10} {:>10} {:>10} {:>8} {:>10} {:>9}"
HEADER = ("format", "batch", "context", "us", "bf16 us", "ideal us", "x bf16", "MB read", "of copy")
Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int


def measure(calls: list[Callable[[], object]], device: torch.device, replays: int = 20) -> float:
    """Median seconds per call: of the replays of one graph of all calls, or of plain calls without a GPU."""
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
    """Launches over rotated tables, and the bytes that one reads."""
    from vllm_kvq.eval.packed_attention import random_pages
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.device import kernels_of

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
    """Launches over rotated bf16 K and V, by what attends them."""
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


def _by_token(x: torch.Tensor) -> tuple[int, ...]:
    """The same bytes as (batch, tokens, heads, channels): they are random, and the time is what counts."""
    return (x.shape[0], x.shape[2], x.shape[1], x.shape[3])


def bf16_bytes(shape: Shape) -> int:
    return shape.batch * shape.context * HEADS * HEAD * 4


def rotations(read: int, device: torch.device) -> int:
    return min(32, max(1, ROTATED_BYTES // read)) if device.type == "cuda" else 1


def fits(read: int, device: torch.device) -> bool:
    return device.type != "cuda" or 1.2 * max(read, ROTATED_BYTES) < torch.cuda.mem_get_info()[0]


def run(device: torch.device, formats: list[str], shapes: list[Shape], deadline: float) -> None:
    bandwidth = copy_bandwidth(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: times mean nothing"
    print(f"{name}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s (read + write)")
    print(ROW.format(*HEADER))
    times: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for shape in shapes:
        full = bf16_bytes(shape)
        if not fits(full, device):
            print(f"batch {shape.batch} context {shape.context}: left out, bf16 needs {full / 1e9:.0f} GB")
            continue
        if time.monotonic() > deadline:
            print(f"batch {shape.batch} context {shape.context}: left out, no time")
            continue
        rivals: dict[str, float] = {}
        for name, calls in bf16_calls(shape, device).items():
            try:
                rivals[name] = measure(calls, device)
            except RuntimeError as error:  # a backend that refuses these shapes
                print(f"{name}: {str(error).splitlines()[0]}")
        del calls
        base, ideal = min(rivals.values()), full / bandwidth
        for name, took in rivals.items():
            print(line(name, shape, took, base, ideal, full, bandwidth), flush=True)
        for f in formats:
            if time.monotonic() > deadline:
                break
            own, read = packed_calls(f, shape, device)
            took = measure(own, device)
            del own
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(line(f, shape, took, base, ideal, read, bandwidth), flush=True)
            times.setdefault((f, shape.batch), []).append((shape.context, took, base))
    print("\nslope: ns per token of context between the two longest; break-even: shortest context not slower than bf16")
    for (f, batch), rows in times.items():
        print(summary(f, batch, rows))


def line(name: str, shape: Shape, took: float, base: float, ideal: float, read: int, bandwidth: float) -> str:
    times = (f"{1e6 * x:.1f}" for x in (took, base, ideal))
    # a copy reads and writes: its bandwidth counts both
    share = f"{read / took / bandwidth:.0%}"
    return ROW.format(name, shape.batch, shape.context, *times, f"{base / took:.2f}", f"{read / 1e6:.1f}", share)


def summary(name: str, batch: int, rows: list[tuple[int, float, float]]) -> str:
    """`rows`: (context, seconds, seconds of bf16), by context."""
    even = next((str(c) for c, took, base in rows if took <= base), "none")
    slope = "-"
    if len(rows) > 1:
        (c0, t0, _), (c1, t1, _) = rows[-2:]
        slope = f"{1e9 * (t1 - t0) / (c1 - c0) / batch:.3f}"
    return f"{name:<10} batch {batch:>3}   slope {slope:>9}   break-even {even}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode times of packed formats on a GPU.")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=300, help="start no measurement after this time")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes without a GPU")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        run(torch.device("cpu"), args.formats, [Shape(1, 64), Shape(1, 128)], deadline)
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device; --dry-run tries the script without one", file=sys.stderr)
        return 1
    shapes = [Shape(b, c) for b in args.batches for c in args.contexts]
    run(torch.device("cuda", torch.cuda.current_device()), args.formats, shapes, deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())

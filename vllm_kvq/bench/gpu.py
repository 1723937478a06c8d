"""Decode times of the Triton kernels on a GPU, against torch's SDPA on bf16 and against the copy bandwidth.

    python3 -m vllm_kvq.bench.gpu                      32 query heads on 8 KV heads of 128 channels
    python3 -m vllm_kvq.bench.gpu --dry-run            tiny shapes under Triton's interpreter, no GPU: no meaning

Every measurement replays a CUDA graph of several launches on rotated page tables (and rotated K and V), so that
together they read more than the cache holds; the median replay counts. "ideal" is the time in which bf16 K and V
could be copied: no bf16 kernel is faster, whereas SDPA may be slower than a decode kernel made for it. No GPU has run
this yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FORMATS = ("squat2", "squat4", "innerq2", "polar4", "polar3")
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
HEADS, SHARE, HEAD, N = 8, 4, 128, 64
ROTATED_BYTES = 512 << 20
ROW = "{:<9} {:>5} {:>8} {:>10} {:>10} {:>10} {:>8} {:>10} {:>9}"


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


def packed_calls(name: str, shape: Shape, device: torch.device) -> tuple[list[Callable[[], object]], int]:
    """Launches over rotated tables, and the bytes that one reads."""
    from vllm_kvq.eval.packed_attention import random_pages
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels import triton as kernels

    fmt = get_format(name).bind(Geometry(HEAD, N))
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


def sdpa_calls(shape: Shape, device: torch.device) -> tuple[list[Callable[[], object]], int]:
    read = shape.batch * shape.context * HEADS * HEAD * 4
    query = torch.randn(shape.batch, HEADS * SHARE, 1, HEAD, device=device, dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    calls: list[Callable[[], object]] = []
    for _ in range(rotations(read, device)):
        size = (shape.batch, HEADS, shape.context, HEAD)
        k, v = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
        calls.append(lambda k=k, v=v: attention(query, k, v, enable_gqa=True))  # type: ignore[misc]
    return calls, read


def rotations(read: int, device: torch.device) -> int:
    return min(32, max(1, ROTATED_BYTES // read)) if device.type == "cuda" else 1


def fits(read: int, device: torch.device) -> bool:
    return device.type != "cuda" or 1.2 * max(read, ROTATED_BYTES) < torch.cuda.mem_get_info()[0]


def run(device: torch.device, formats: list[str], shapes: list[Shape], deadline: float) -> None:
    bandwidth = copy_bandwidth(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: times mean nothing"
    print(f"{name}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s (read + write)")
    print(ROW.format("format", "batch", "context", "us", "SDPA us", "ideal us", "x SDPA", "MB read", "of copy"))
    times: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for shape in shapes:
        calls: list[Any] = []
        full = shape.batch * shape.context * HEADS * HEAD * 4
        if not fits(full, device) or time.monotonic() > deadline:
            print(f"batch {shape.batch} context {shape.context}: left out, no memory or no time")
            continue
        calls, _ = sdpa_calls(shape, device)
        base = measure(calls, device)
        del calls
        for f in formats:
            if time.monotonic() > deadline:
                break
            calls, read = packed_calls(f, shape, device)
            took = measure(calls, device)
            del calls
            if device.type == "cuda":
                torch.cuda.empty_cache()
            ideal = full / bandwidth
            cells = (f"{1e6 * took:.1f}", f"{1e6 * base:.1f}", f"{1e6 * ideal:.1f}", f"{base / took:.2f}")
            share = f"{read / took / bandwidth:.0%}"
            print(ROW.format(f, shape.batch, shape.context, *cells, f"{read / 1e6:.1f}", share), flush=True)
            times.setdefault((f, shape.batch), []).append((shape.context, took, base))
    print("\nslope: ns per token of context between the two longest; break-even: shortest context not slower than SDPA")
    for (f, batch), rows in times.items():
        even = next((str(c) for c, took, base in rows if took <= base), "none")
        slope = "-"
        if len(rows) > 1:
            (c0, t0, _), (c1, t1, _) = rows[-2:]
            slope = f"{1e9 * (t1 - t0) / (c1 - c0) / batch:.3f}"
        print(f"{f:<9} batch {batch:>3}   slope {slope:>9}   break-even {even}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode times of packed formats on a GPU.")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=300, help="start no measurement after this time")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes under Triton's interpreter")
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

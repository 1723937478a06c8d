"""Decode times of the Triton and CUDA kernels on a GPU, against attention over bf16 and against the copy bandwidth.

    python3 -m vllm_kvq.bench.gpu                      32 query heads on 8 KV heads of 128 channels
    python3 -m vllm_kvq.bench.gpu --dry-run            tiny shapes without a GPU (interpreter, emulation): no meaning

Every measurement replays a CUDA graph of several launches on rotated page tables (and rotated K and V), so that
together they read more than the cache holds; the median replay counts. bf16 is the fastest of torch's SDPA with its own
choice, SDPA limited to its FlashAttention backend, and the package flash_attn if installed; each has its row.
"ideal" is the time in which bf16 K and V could be copied: no bf16 kernel is faster. The fp8 column is that of
FlashAttention 3 (the package flash_attn_interface, on Hopper); torch can't attend fp8 keys and values, so without it
the column says "n.m.", not measured, and half of "ideal" bounds it. The last part is the cost of packing a prompt
compared with a layer's prefill. No GPU has run this yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_kvq.bench.gpu_results import Results

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
HEADS, SHARE, HEAD, N = 8, 4, 128, 64
ROTATED_BYTES = 512 << 20
ROW = "{:<12} {:>5} {:>8} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8} {:>10} {:>9}"
HEADER = ("format", "batch", "context", "us", "bf16 us", "fp8 us", "ideal us", "x bf16", "x fp8", "MB read", "of copy")
PROMPT, HIDDEN, MLP = 4096, 4096, 14336
"""Tokens of a prompt, and the layer of an 8B Llama with which packing them is compared."""
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


def run(device: torch.device, formats: list[str], shapes: list[Shape], deadline: float, results: Results) -> None:
    """Prints the table; measurements in `results` are not repeated."""
    copied = results.take("copy", 0, 0, lambda: (1 / copy_bandwidth(device), 1))
    bandwidth = 1 / copied.seconds
    tell = results.tell
    tell(f"{results.device}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s (read + write)")
    tell(ROW.format(*HEADER))
    times: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for shape in shapes:
        full, at = bf16_bytes(shape), (shape.batch, shape.context)
        if not fits(full, device):
            tell(f"batch {shape.batch} context {shape.context}: left out, bf16 needs {full / 1e9:.0f} GB")
            continue
        if time.monotonic() > deadline and results.known("sdpa", *at) is None:
            tell(f"batch {shape.batch} context {shape.context}: left out, no time")
            continue
        rivals, fp8 = _rivals(shape, device, results)
        base, ideal = min(rivals.values()), full / bandwidth
        for name, took in rivals.items():
            tell(line(name, shape, took, base, fp8, ideal, full, bandwidth))
        for f in formats:
            if time.monotonic() > deadline and results.known(f, *at) is None:
                continue
            own = results.take(f, *at, lambda f=f, shape=shape: _packed(f, shape, device))  # type: ignore[misc]
            tell(line(f, shape, own.seconds, base, fp8, ideal, own.read, bandwidth))
            times.setdefault((f, shape.batch), []).append((shape.context, own.seconds, base))
    tell("")
    tell("slope: ns per token of context between the two longest; break-even: shortest context not slower than bf16")
    for (f, batch), rows in times.items():
        tell(summary(f, batch, sorted(rows)))


def _packed(name: str, shape: Shape, device: torch.device) -> tuple[float, int]:
    calls, read = packed_calls(name, shape, device)
    took = measure(calls, device)
    del calls
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return took, read


def _rivals(shape: Shape, device: torch.device, results: Results) -> tuple[dict[str, float], float | None]:
    """Seconds of the kernels that attend bf16, by name, and of the one that attends fp8."""
    at, full = (shape.batch, shape.context), bf16_bytes(shape)
    kept = {name: row.seconds for name in RIVALS if (row := results.known(name, *at))}
    if not kept:
        for name, calls in bf16_calls(shape, device).items():
            try:
                took = measure(calls, device)
            except RuntimeError as error:  # a backend that refuses these shapes
                print(f"{name}: {str(error).splitlines()[0]}")
                continue
            kept[name] = results.take(name, *at, lambda took=took: (took, full)).seconds  # type: ignore[misc]
        del calls
    try:
        eight = results.take("fp8", *at, lambda: (measure(fp8_calls(shape, device), device), full // 2)).seconds
    # no FlashAttention 3, or it does not support this GPU, or has another version
    except (ImportError, RuntimeError, TypeError):
        eight = None
    return kept, eight


def line(
    name: str, shape: Shape, took: float, base: float, fp8: float | None, ideal: float, read: int, bandwidth: float
) -> str:
    times = ("n.m." if x is None else f"{1e6 * x:.1f}" for x in (took, base, fp8, ideal))
    ratios = ("n.m." if x is None else f"{x / took:.2f}" for x in (base, fp8))
    # a copy reads and writes: its bandwidth counts both
    share = f"{read / took / bandwidth:.0%}"
    return ROW.format(name, shape.batch, shape.context, *times, *ratios, f"{read / 1e6:.1f}", share)


def prompt_calls(name: str, tokens: int, device: torch.device) -> Calls:
    """The whole cost of a prompt of one chunk beyond its attention: begin, pack, commit."""
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.step import GPUStep
    from vllm_kvq.kernels.slots import SlotGeometry
    from vllm_kvq.kernels.step import Caches, StepBatch

    fmt = get_format(name).bind(Geometry(HEAD, N, torch.bfloat16))
    slots = SlotGeometry.of(fmt, HEADS, 0)
    step = GPUStep(fmt, slots, 0, HEAD**-0.5, device)
    counts = [-(-tokens // N), slots.sidecar_blocks, slots.sink_blocks]
    blocks = 1 + sum(counts)
    table, side, sinks = (
        x[None].contiguous() for x in torch.arange(1, blocks, dtype=torch.int32, device=device).split(counts)
    )
    pages = torch.zeros(blocks, HEADS, fmt.record_bytes, dtype=torch.uint8, device=device)
    pools = [torch.zeros(blocks, slots.page_bytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2)]
    caches = Caches(pages, pools[0], pools[1] if fmt.S else None)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    batch = StepBatch(ends.cpu(), ends, ends[1:].clone(), table, side, sinks if fmt.S else None, tokens)
    query = torch.randn(tokens, HEADS * SHARE, HEAD, dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(tokens, HEADS, HEAD, dtype=torch.bfloat16, device=device) for _ in range(2))

    def call() -> None:
        plan = step._begin(batch, caches, query, key, value)
        if step.fits_queries:
            step._fit(batch, caches, plan, query, 0)
        step._pack(batch, caches, plan, key, value)

    # the header stays zero, so every call is the first of its request
    return [call]


def prefill_seconds(tokens: int, device: torch.device) -> float:
    """One layer's matrix products and causal attention over a prompt, in bf16."""
    half = torch.bfloat16
    # a dry run's layer is narrow: its time means nothing, and the real one takes minutes on a CPU
    hidden, mlp = (HIDDEN, MLP) if device.type == "cuda" else (HEAD, HEAD)
    x, attended, inner = (
        torch.randn(tokens, n, device=device, dtype=half) for n in (hidden, HEADS * SHARE * HEAD, mlp)
    )
    heads = (HEADS * SHARE + 2 * HEADS) * HEAD
    shapes = ((hidden, heads), (HEADS * SHARE * HEAD, hidden), (hidden, 2 * mlp), (mlp, hidden))
    weights = [torch.randn(shape, device=device, dtype=half) for shape in shapes]
    inputs = x, attended, x, inner
    query = torch.randn(1, HEADS * SHARE, tokens, HEAD, device=device, dtype=half)
    key, value = (torch.randn(1, HEADS, tokens, HEAD, device=device, dtype=half) for _ in range(2))

    def call() -> None:
        for a, b in zip(inputs, weights, strict=True):
            a @ b
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return measure([call], device)


def run_prompts(device: torch.device, formats: list[str], tokens: int, results: Results) -> None:
    whole = results.take("a layer's prefill", 1, tokens, lambda: (prefill_seconds(tokens, device), 0)).seconds
    results.tell("")
    results.tell(
        f"packing a prompt of {tokens} tokens; the products and attention of an 8B layer: {1e6 * whole:.0f} us"
    )
    for name in dict.fromkeys(f.partition("+")[0] for f in formats):
        own = results.take(f"packing {name}", 1, tokens, lambda name=name: (_packing(name, tokens, device), 0))  # type: ignore[misc]
        results.tell(f"{name:<12} {1e6 * own.seconds:>10.1f} us   {own.seconds / whole:.1%} of the layer")


def _packing(name: str, tokens: int, device: torch.device) -> float:
    calls = prompt_calls(name, tokens, device)
    # SQuat's eigenvectors are computed by PyTorch, which a graph can't capture
    return measure(calls, device) if not name.startswith("squat") else plain_seconds(calls, device)


def plain_seconds(calls: Calls, device: torch.device, rounds: int = 10) -> float:
    """Median seconds of a call without a graph, including waiting for the device."""
    times = []
    for _ in range(rounds if device.type == "cuda" else 1):
        start = time.perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / len(calls))
    return statistics.median(times)


def summary(name: str, batch: int, rows: list[tuple[int, float, float]]) -> str:
    """`rows`: (context, seconds, seconds of bf16), by context."""
    even = next((str(c) for c, took, base in rows if took <= base), "none")
    slope = "-"
    if len(rows) > 1:
        (c0, t0, _), (c1, t1, _) = rows[-2:]
        slope = f"{1e9 * (t1 - t0) / (c1 - c0) / batch:.3f}"
    return f"{name:<12} batch {batch:>3}   slope {slope:>9}   break-even {even}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode times of packed formats on a GPU.")
    parser.add_argument("--formats", nargs="+", default=list(formats()))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=300, help="time after which no measurement is started")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="folder that keeps every number; none is measured again"
    )
    parser.add_argument("--dry-run", action="store_true", help="use tiny shapes, without a GPU")
    parser.add_argument("--compile", action="store_true", help="only launch everything once, to compile it")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        nowhere = Results(args.results, "dry run: times mean nothing")
        run(torch.device("cpu"), args.formats, [Shape(1, 64)], deadline, nowhere)
        run_prompts(torch.device("cpu"), args.formats, 64, nowhere)
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device; --dry-run tries the script without one", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    if args.compile:
        for name in args.formats:
            bare = name.partition("+")[0]
            for call in (packed_calls(name, Shape(1, 1024), device)[0][0], *prompt_calls(bare, PROMPT, device)):
                call()
        return 0
    # the longest contexts matter most: only short ones are left out for lack of time
    shapes = [Shape(b, c) for c in sorted(args.contexts, reverse=True) for b in args.batches]
    results = Results(args.results, torch.cuda.get_device_name())
    run(device, args.formats, shapes, deadline, results)
    run_prompts(device, args.formats, PROMPT, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

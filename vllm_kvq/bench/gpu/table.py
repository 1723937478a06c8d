"""What is measured on a GPU, in order, and its table.

"ideal" is the time in which bf16 K and V could be copied: no bf16 kernel is faster. Without FlashAttention 3 the fp8
column says "n.m.", not measured, and half of "ideal" bounds it. The last part is the cost of packing a prompt compared
with a layer's prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvq.bench.gpu.decode import Shape, bf16_bytes, copy_bandwidth, fits, packed
from vllm_kvq.bench.gpu.prompts import packing, prefill_seconds
from vllm_kvq.bench.gpu.results import NoTime, Results
from vllm_kvq.bench.gpu.rivals import rivals

ROW = "{:<12} {:>5} {:>8} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8} {:>10} {:>9}"
HEADER = ("format", "batch", "context", "us", "bf16 us", "fp8 us", "ideal us", "x bf16", "x fp8", "MB read", "of copy")


def run(device: torch.device, formats: Sequence[str], shapes: Sequence[Shape], results: Results) -> None:
    """Prints the table; measurements in `results` are not repeated. NoTime without the copy's speed."""
    copied = results.take("copy", 0, 0, lambda: (1 / copy_bandwidth(device), 1))
    bandwidth = 1 / copied.seconds
    tell = results.tell
    tell(f"{results.device}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s (read + write)")
    tell(ROW.format(*HEADER))
    times: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for shape in shapes:
        full, at = bf16_bytes(shape), (shape.batch, shape.context)
        if not fits(full, device):
            results.note(f"batch {shape.batch} context {shape.context}: left out, bf16 needs {full / 1e9:.0f} GB")
            continue
        try:
            found, fp8 = rivals(shape, device, results)
        except NoTime:
            results.note(f"batch {shape.batch} context {shape.context}: left out, no time")
            continue
        base, ideal = min(found.values()), full / bandwidth
        for name, took in found.items():
            tell(line(name, shape, took, base, fp8, ideal, full, bandwidth))
        for f in formats:
            try:
                own = results.take(f, *at, lambda f=f, shape=shape: packed(f, shape, device))  # type: ignore[misc]
            except NoTime:
                continue
            tell(line(f, shape, own.seconds, base, fp8, ideal, own.read, bandwidth))
            times.setdefault((f, shape.batch), []).append((shape.context, own.seconds, base))
    tell("")
    tell("slope: ns per token of context between the two longest; break-even: shortest context not slower than bf16")
    for (f, batch), rows in times.items():
        tell(summary(f, batch, sorted(rows)))


def line(
    name: str, shape: Shape, took: float, base: float, fp8: float | None, ideal: float, read: int, bandwidth: float
) -> str:
    return ROW.format(*cells(name, shape, took, base, fp8, ideal, read, bandwidth))


def cells(
    name: str, shape: Shape, took: float, base: float, fp8: float | None, ideal: float, read: int, bandwidth: float
) -> list[str]:
    """As many as HEADER has."""
    times = ("n.m." if x is None else f"{1e6 * x:.1f}" for x in (took, base, fp8, ideal))
    ratios = ("n.m." if x is None else f"{x / took:.2f}" for x in (base, fp8))
    # a copy reads and writes: its bandwidth counts both
    share = f"{read / took / bandwidth:.0%}"
    return [name, str(shape.batch), str(shape.context), *times, *ratios, f"{read / 1e6:.1f}", share]


def run_prompts(device: torch.device, formats: Sequence[str], tokens: int, results: Results) -> None:
    """Raises NoTime without the layer to compare with."""
    whole = results.take("a layer's prefill", 1, tokens, lambda: (prefill_seconds(tokens, device), 0)).seconds
    results.tell("")
    results.tell(
        f"packing a prompt of {tokens} tokens; the products and attention of an 8B layer: {1e6 * whole:.0f} us"
    )
    for name in dict.fromkeys(formats):
        try:
            own = results.take(f"packing {name}", 1, tokens, lambda name=name: (packing(name, tokens, device), 0))  # type: ignore[misc]
        except NoTime:
            continue
        results.tell(f"{name:<12} {1e6 * own.seconds:>10.1f} us   {own.seconds / whole:.1%} of the layer")


def summary(name: str, batch: int, rows: list[tuple[int, float, float]]) -> str:
    slope, even = growth(batch, rows)
    return f"{name:<12} batch {batch:>3}   slope {slope:>9}   break-even {even}"


def growth(batch: int, rows: list[tuple[int, float, float]]) -> tuple[str, str]:
    """Slope and break-even. `rows`: (context, seconds, seconds of bf16), by context."""
    even = next((str(c) for c, took, base in rows if took <= base), "none")
    slope = "-"
    if len(rows) > 1:
        (c0, t0, _), (c1, t1, _) = rows[-2:]
        slope = f"{1e9 * (t1 - t0) / (c1 - c0) / batch:.3f}"
    return slope, even

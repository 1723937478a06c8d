"""The report of measurements that `bench gpu` has kept, which `bench plot` writes, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vllm_kvq.bench.gpu.chunks import CHUNK, HISTORY, HOW
from vllm_kvq.bench.gpu.decode import HEAD, HEADS, SHARE
from vllm_kvq.bench.gpu.kept import Kept
from vllm_kvq.bench.gpu.table import HEADER
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.cli.page.made import command
from vllm_kvq.cli.page.plots import pictures
from vllm_kvq.console import Table

ABOUT = (
    f"Decode steps of one layer on a GPU, {HEADS * SHARE} query heads on {HEADS} KV heads of {HEAD} channels: the "
    "Triton and CUDA kernels over packed pages, next to attention over bf16 and fp8 and to copying memory."
)
COLUMNS = (
    "us: the median of replays of a CUDA graph. bf16 us: the fastest kernel over bf16 there is; fp8 us: FlashAttention "
    "3. ideal us: the time in which bf16 keys and values could be copied. n.m.: not measured.",
    "x bf16, x fp8: how many times as fast. of copy: the speed of reading, as a share of a copy's.",
    "slope: ns per token of context between the two longest. break-even: the shortest context not slower than bf16.",
)
KEPT = "What the CSV held already, with the same torch, was not measured again."


def tables(kept: Kept, of: str = "") -> Iterator[Table]:
    """`of` names the device if others are on the page, too."""
    if steps := kept.decoding():
        title = f"{of}Decode steps: torch {kept.torch}, copy {kept.bandwidth / 1e9:.0f} GB/s (read + write)"
        yield Table(HEADER, steps, title=title)
        yield Table(("format", "batch", "slope", "break-even"), kept.growing(), title=f"{of}Growth with context")
    for tokens, layer, rows in kept.packing():
        title = f"{of}Packing a prompt of {tokens:,} tokens: the products and attention of an 8B layer take "
        yield Table(("format", "us", "of the layer"), rows, title=f"{title}{1e6 * layer:,.0f} us")
    for history, kernel, plain, rows in kept.chunks():
        size = f"{CHUNK:,} tokens" if history == HISTORY else "a prompt"
        title = f"{of}A chunk of {size} over {history:,} packed ones: over bf16, by {kernel}, {1e6 * plain:,.0f} us"
        heads = (head for how in HOW for head in (f"{how}, us", "times as long as bf16"))
        yield Table(("format", *heads), rows, title=title)


def write(
    prog: str,
    folder: Path,
    devices: Sequence[Kept],
    place: Callable[[Kept], Path],
    notes: Sequence[str],
    arguments: Sequence[str] | None,
    facts: Sequence[tuple[str, str]],
) -> list[Path]:
    """Writes report.html, and a PNG of each device where `place` says; returns what was written, the page first."""
    report = Report(prog, "gpu-DEVICE", ABOUT, "Speed against bf16", COLUMNS)
    drawn = pictures(lambda: [kept.plot(place(kept)) for kept in devices if kept.panels()])
    shown = [table for kept in devices for table in tables(kept, f"{kept.device}, " if devices[1:] else "")]
    names = ", ".join(kept.device for kept in devices)
    page = report.page(drawn, shown, notes, command(prog, arguments), facts, names).write(folder)
    return [page, *(picture.path for picture in drawn or ())]

"""The best possible speed of the GPU kernels' attention over packed pages on a GPU: computed, not measured.

    python -m proof roofline            the tables of docs/gpu.md, from the counts in docs/results/gpu-pipes.csv
    python -m proof roofline --count    compiles the kernels, without a GPU, and writes that file first; minutes

A cached token of one KV head (head size 128, page 64, up to 8 query heads) takes its bytes of memory, and the
instructions that the inner loop's SASS has for it. The bound is the slowest of: the chip's memory bandwidth; its
schedulers' issue; and each of its units (ALU, FMA, matrix, special functions, loads). All overlap perfectly and nothing
else is counted: no latency, no launches, no merge, no tokens in full precision. bf16 and fp8 FlashAttention are given
only their bytes, at the same bandwidth.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from proof.tables import attended
from proof.tables.attended import HEAD, PAGE
from proof.tables.gpu import pipes

ROOT = Path(__file__).resolve().parents[3]
COUNTS = ROOT / "docs" / "results" / "gpu-pipes.csv"
RIVALS = {"bf16": 4.0 * HEAD, "fp8": 2.0 * HEAD}
"""Bytes of a token."""


@dataclass(frozen=True)
class Chip:
    name: str
    target: int
    bandwidth: float
    """Bytes per second."""
    multiprocessors: int
    clock: float
    """Hertz."""
    products: int
    """Multiply-adds of 16 bits into 32 per clock and multiprocessor, by the matrix instructions of the kernels."""
    source: str

    def seconds(self, bytes_: float, counts: dict[str, float] | None = None) -> dict[str, float]:
        """The time of a token by each of the bounds; `counts` are instructions of a warp."""
        taken = {"bytes": bytes_ / self.bandwidth}
        if counts is not None:
            per_second = self.multiprocessors * self.clock
            taken |= {unit: n / per_second for unit, n in pipes.cycles(counts, self.products).items()}
        return taken


HOPPER = "clock: 989 dense TFLOPS in 16 bits / (132 * 4096)"
ADA = "Ada white paper and data sheet"
CHIPS = (
    Chip("H100", 90, 3.35e12, 132, 1.83e9, 1024, f"H100 SXM data sheet; {HOPPER}"),
    Chip("H200", 90, 4.8e12, 132, 1.83e9, 1024, f"H200 SXM data sheet; {HOPPER}"),
    Chip(
        "B200",
        100,
        8.0e12,
        148,
        1.86e9,
        1024,
        "DGX B200 data sheet; clock: 2.25 dense PFLOPS in 16 bits / (148 * 8192)",
    ),
    Chip("L40S", 89, 0.864e12, 142, 2.52e9, 512, f"L40S: {ADA}"),
    Chip("RTX 4090", 89, 1.008e12, 128, 2.52e9, 256, f"GeForce RTX 4090: {ADA}"),
)
"""H100, H200 and B200 have their full rate with matrix instructions other than a warp's `mma`. The kernels use `mma`,
which is given an A100's rate."""


@dataclass(frozen=True)
class Count:
    """Instructions of the inner loop, of all warps of a block that share a turn."""

    format: str
    target: int
    tokens: int
    """Tokens in one turn of the loop."""
    tensor: int
    sfu: int
    lsu: int
    fma: int
    alu: int
    other: int

    def __post_init__(self) -> None:
        if self.tokens <= 0 or min(astuple(self)[3:]) < 0:
            raise ValueError(f"{self.format} on sm_{self.target} has no loop of such counts")

    @property
    def per_token(self) -> dict[str, float]:
        """Instructions of a warp."""
        return {name: getattr(self, name) / self.tokens for name in pipes.PIPES}


def counted(targets: Sequence[int]) -> Iterator[Count]:
    """From kernels that are compiled now."""
    from proof.tables.gpu import compile_cuda, compile_table

    for target in targets:
        for variant in compile_table.attend_variants(target):
            name = variant.name.split()[1]
            if variant.name == f"attend {name} d={HEAD} rows=8":
                loop = compile_table.inner_loop(compile_table.build(variant, target))
                # a block is one warp
                yield Count(name, target, variant.elements // (2 * HEAD), **pipes.count(loop))
        for made in compile_cuda.variants():
            name = made.name.split()[1]
            if made.name == f"attend {name} d={HEAD} rows=8":
                with tempfile.TemporaryDirectory() as folder:
                    # a warp takes a slab of 32 tokens per turn
                    yield Count(name, target, 32, **pipes.count(compile_cuda.inner_loop(made, target, Path(folder))))


def write(rows: Iterator[Count], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(Count)])
        for row in rows:
            print(row, file=sys.stderr, flush=True)
            writer.writerow(astuple(row))


def read(path: Path) -> list[Count]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Count(name, *map(int, rest)) for name, *rest in list(csv.reader(file))[1:]]


def stored(name: str) -> float:
    """Bytes of a token of one KV head."""
    return attended.bound(name).record_bytes / PAGE


def named(formats: Sequence[str]) -> str:
    """What the rows of a kernel are called: all formats that it attends."""
    return ", ".join(f"`{name}`" for name in formats)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def instructions(rows: Sequence[Count], target: int) -> str:
    """Per lane and cached element, by unit."""
    lines, names = [], attended.shared()
    for row in rows:
        if row.target == target:
            each = {name: 32 * n / (2 * HEAD) for name, n in row.per_token.items()}
            by_unit = [f"{each[name]:.2f}" for name in pipes.PIPES]
            special = f"{256 * each['sfu']:.0f}"
            lines.append(
                [named(names[row.format]), f"{stored(row.format):g}", f"{sum(each.values()):.2f}", *by_unit, special]
            )
    lines += [
        [f"`{name}`", f"{stored(name):g}", "PyTorch", *[""] * (len(pipes.PIPES) + 1)] for name in attended.by_pytorch()
    ]
    units = ("matrix", "special", "loads, shuffles", "FMA", "ALU", "other")
    return table(["format", "bytes", "instructions", *units, "special per 256"], lines)


def bounds(rows: Sequence[Count]) -> str:
    """Picoseconds, what bounds them, and how much faster that is than bf16 and fp8."""
    lines = [[name, *(f"{1e12 * b / chip.bandwidth:.0f}" for chip in CHIPS)] for name, b in RIVALS.items()]
    for name, formats in attended.shared().items():
        cells = [named(formats)]
        for chip in CHIPS:
            (row,) = (r for r in rows if (r.format, r.target) == (name, chip.target))
            taken = chip.seconds(stored(name), row.per_token)
            bound, seconds = max(taken.items(), key=lambda item: item[1])
            rivals = " ".join(f"{b / chip.bandwidth / seconds:.1f}x" for b in RIVALS.values())
            cells.append(f"{1e12 * seconds:.0f} {bound}, {rivals}")
        lines.append(cells)
    return table(["", *(chip.name for chip in CHIPS)], lines)


def chips() -> str:
    lines = [
        [c.name, f"{c.bandwidth / 1e12:g}", f"{c.multiprocessors}", f"{c.clock / 1e9:g}", f"{c.products}", c.source]
        for c in CHIPS
    ]
    return table(["chip", "TB/s", "multiprocessors", "GHz", "products per clock", "from"], lines)


def page(rows: Sequence[Count]) -> str:
    """The table in docs/gpu.md."""
    return "\n\n".join([
        "Bytes per token; instructions per lane and cached element in the inner loop of decode (sm_90, up to 8 rows):",
        instructions(rows, 90),
        "Picoseconds per token and KV head, what bounds them, and how much faster that is than bf16 and than fp8:",
        bounds(rows),
        "The chips:",
        chips(),
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", action="store_true", help="compile and count first")
    args = parser.parse_args(argv)
    if args.count:
        write(counted(sorted({chip.target for chip in CHIPS})), COUNTS)
    print(page(read(COUNTS)))
    return 0

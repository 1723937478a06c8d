"""What measurements that were kept say: the rows of `bench gpu`'s tables and its plot, made again from the CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_kvq.bench.figures import Curves, draw, times
from vllm_kvq.bench.gpu.chunks import HOW
from vllm_kvq.bench.gpu.decode import Shape, bf16_bytes
from vllm_kvq.bench.gpu.results import Measured, read
from vllm_kvq.bench.gpu.rivals import BF16
from vllm_kvq.bench.gpu.table import cells, growth
from vllm_kvq.drawing import Picture

Cells = list[list[str]]


@dataclass(frozen=True)
class Step:
    """A kernel's decode step next to the fastest one over bf16."""

    name: str
    shape: Shape
    seconds: float
    bf16: float
    fp8: float | None
    read: int

    @property
    def rival(self) -> bool:
        return self.name in BF16


@dataclass(frozen=True)
class Kept:
    """One device's measurements with one torch."""

    device: str
    torch: str
    rows: Sequence[Measured]

    @classmethod
    def of(cls, path: Path) -> Kept:
        """The measurements with the torch that measured last. ValueError if there are no decode times among them."""
        rows = read(path)
        newest = [row for row in rows if row.torch == rows[-1].torch]
        found = cls(path.stem.removeprefix("gpu-"), newest[-1].torch if newest else "", newest)
        if not found.steps() or not found._seconds("copy"):
            raise ValueError(f"{path} holds no decode times next to bf16's")
        return found

    def _seconds(self, what: str) -> dict[tuple[int, int], float]:
        return {(row.batch, row.context): row.seconds for row in self.rows if row.what == what}

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, which is measured before all else."""
        return 1 / self._seconds("copy")[0, 0]

    def steps(self) -> list[Step]:
        """Steps for which there is a bf16 kernel to compare with: long contexts first, and kernels in their order."""
        found: list[Step] = []
        eight = self._seconds("fp8")
        rivals = [self._seconds(name) for name in BF16]
        # neither the copy nor the measurements of prompts are decode steps at a context
        for row in (row for row in self.rows if row.read and row.context):
            at = (row.batch, row.context)
            bf16 = [seconds[at] for seconds in rivals if at in seconds]
            if bf16 and row.what != "fp8":
                found.append(Step(row.what, Shape(*at), row.seconds, min(bf16), eight.get(at), row.read))
        return sorted(found, key=lambda step: (-step.shape.context, step.shape.batch, not step.rival))

    def decoding(self) -> Cells:
        """The cells under table.HEADER."""
        wide = self.bandwidth
        return [
            cells(s.name, s.shape, s.seconds, s.bf16, s.fp8, bf16_bytes(s.shape) / wide, s.read, wide)
            for s in self.steps()
        ]

    def growing(self) -> Cells:
        """Format, batch, slope and break-even."""
        found: dict[tuple[int, str], list[tuple[int, float, float]]] = {}
        for step in self.steps():
            if not step.rival:
                of = found.setdefault((step.shape.batch, step.name), [])
                of.append((step.shape.context, step.seconds, step.bf16))
        return [
            [name, str(batch), *growth(batch, sorted(rows))]
            for (batch, name), rows in sorted(found.items(), key=lambda item: item[0][0])
        ]

    def packing(self) -> Iterator[tuple[int, float, Cells]]:
        """Tokens of a prompt, seconds of a layer's prefill; format, microseconds, and share of that layer."""
        for (batch, tokens), whole in self._seconds("a layer's prefill").items():
            own = _named(self.rows, "packing ", batch, tokens)
            yield tokens, whole, [[name, f"{1e6 * took:.1f}", f"{took / whole:.1%}"] for name, took in own.items()]

    def chunks(self) -> Iterator[tuple[int, str, float, Cells]]:
        """Packed tokens, the kernel over bf16 and its seconds; format, and for each way microseconds and quotient."""
        for plain in (row for row in self.rows if row.what.startswith("chunk bf16 by ")):
            own = _named(self.rows, "chunk ", plain.batch, plain.context)
            own.pop(plain.what.removeprefix("chunk "))
            rows = []
            for name in dict.fromkeys(what.split(" ", 1)[0] for what in own):
                took = [own.get(f"{name} {how}") for how in HOW]
                both = (["-", "-"] if x is None else [f"{1e6 * x:.0f}", f"{x / plain.seconds:.2f}"] for x in took)
                rows.append([name, *(cell for pair in both for cell in pair)])
            yield plain.context, plain.what.removeprefix("chunk bf16 by "), plain.seconds, rows

    def panels(self) -> dict[str, Curves]:
        """By batch, and by kernel: how many times as fast as bf16 it is at each context."""
        found: dict[str, Curves] = {}
        for step in sorted(self.steps(), key=lambda step: step.shape.batch):
            curves = found.setdefault(f"batch {step.shape.batch}", {})
            if step.fp8 is not None:
                curves.setdefault("fp8", [])
                if (point := (step.shape.context, step.bf16 / step.fp8)) not in curves["fp8"]:
                    curves["fp8"].append(point)
            if not step.rival:
                curves.setdefault(step.name, []).append((step.shape.context, step.bf16 / step.seconds))
        return {name: curves for name, curves in found.items() if curves}

    def plot(self, path: Path) -> Picture:
        title = f"{self.device}: speed of a decode step's attention\nbf16: the fastest kernel there is"
        return draw(path, self.panels(), title, times("bf16"))


def _named(rows: Sequence[Measured], start: str, batch: int, context: int) -> dict[str, float]:
    """Seconds by what follows the start of a measurement's name."""
    same = [row for row in rows if row.what.startswith(start) and (row.batch, row.context) == (batch, context)]
    return {row.what.removeprefix(start): row.seconds for row in same}

"""Launches of the kernels that attend packed pages, measured: slabs per iteration, registers, programs per processor.

    python bench/gpu_sweep.py --out sweep.csv [--formats kitty2,innerq2]

What it finds goes into vllm_kvq/kernels/gpu/triton: `attend_launch` of layout.py, and kernels.py.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from vllm_kvq.bench.gpu.decode import Shape, measure, packed_calls
from vllm_kvq.kernels.gpu import launch, loading
from vllm_kvq.kernels.gpu.triton import kernels, layout

SHAPES = (Shape(8, 65536), Shape(64, 4096))
TURNS, REGISTERS, PROGRAMS = (1, 2), (255, 168, 128, 96), (8, 16)


SWEPT = "kitty2,innerq2,polar4,polar3,kivi4,kivi2"
"""The kernels whose launches were chosen by such a sweep."""


@dataclass(frozen=True)
class Limited(launch.Launch):
    registers: int = 255

    @property
    def options(self) -> dict[str, int]:
        return super().options | {"maxnreg": self.registers}


@contextmanager
def launched(turn: int, registers: int, programs: int = 8) -> Iterator[None]:
    def attend_launch(fmt: object, rows: int, chip: int) -> Limited:
        usual = layout.attend_launch(fmt, rows, chip)  # type: ignore[arg-type]
        return Limited(usual.warps, turn, usual.extra, registers=registers)

    with (
        mock.patch.object(kernels, "attend_launch", attend_launch),
        mock.patch.object(kernels, "PROGRAMS_PER_PROCESSOR", programs),
    ):
        yield


def compiled(name: str, turn: int, registers: int) -> str | None:
    """Compiles one kernel into Triton's cache on disk. Returns why that failed, or None."""
    loading.load()
    try:
        with launched(turn, registers):
            packed_calls(name, Shape(1, 1024), torch.device("cuda"))[0][0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=SWEPT, help="(%(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    variants = list(itertools.product(args.formats.split(","), TURNS, REGISTERS))
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        problems = list(pool.map(compiled, *zip(*variants, strict=True)))
    loading.load()
    device = torch.device("cuda")
    with args.out.open("w", newline="", encoding="utf-8") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow(["format", "slabs", "registers", "programs", "batch", "context", "us", "of_copy_gbs"])
        for (name, turn, registers), problem in zip(variants, problems, strict=True):
            if problem:
                print(f"{name} {turn} {registers}: {problem}", flush=True)
                continue
            for shape in SHAPES:
                cells = []
                for programs in PROGRAMS:
                    with launched(turn, registers, programs):
                        calls, read = packed_calls(name, shape, device)
                        took = measure(calls, device, replays=10)
                    del calls
                    cells.append(f"{1e6 * took:8.1f}")
                    at = (name, turn, registers, programs, shape.batch, shape.context)
                    write.writerow([*at, f"{1e6 * took:.2f}", f"{read / took / 1e9:.0f}"])
                print(
                    f"{name:<8} {turn} {registers:>4} {shape.batch:>3} {shape.context:>6} {' '.join(cells)}", flush=True
                )
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

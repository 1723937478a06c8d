"""`vllm-kvq bench plot FILE.csv`: a plot of what `bench gpu --out DIR` has measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.bench.gpu.results import figure

PROG = "vllm-kvq bench plot"


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Plots decode times that `vllm-kvq bench gpu --out DIR` has measured, as a PNG next to each CSV.",
        ("docs/results/gpu-nvidia-h100.csv",),
        "a plot can't be drawn",
    )
    p.add_argument("files", nargs="+", type=Path, metavar="FILE.csv", help="written by `bench gpu` (needs matplotlib)")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    drawn: list[str] = []
    for path in args.files:
        try:
            drawn.append(str(figure(path)))
        except (ImportError, OSError, ValueError) as error:
            return console.fail(PROG, f"no plot of {path}: {error}", args.json)
        if not args.json:
            print(drawn[-1])
    if args.json:
        console.show_json({"plots": drawn})
    return console.DONE

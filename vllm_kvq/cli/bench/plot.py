"""`vllm-kvq bench plot FILE.csv`: a plot of what `bench gpu --out DIR` has measured, and a report of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.bench.gpu.kept import Kept
from vllm_kvq.cli.arguments import add_out, check_file
from vllm_kvq.cli.bench import gpu_report
from vllm_kvq.cli.page.made import NOT_MEASURED

PROG = "vllm-kvq bench plot"


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Plots decode times that `vllm-kvq bench gpu --out DIR` has measured, as a PNG next to each CSV.",
        ("docs/results/gpu-nvidia-h200.csv", "docs/results/gpu-nvidia-h200.csv --out results"),
        "a plot can't be drawn",
    )
    p.add_argument("files", nargs="+", type=Path, metavar="FILE.csv", help="written by `bench gpu` (needs matplotlib)")
    add_out(p, "report.html of all files, and the plots (default: no report, and plots next to each file)")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    for path in args.files:
        check_file(p, path, "a CSV that vllm-kvq bench gpu --out has written")
    devices: list[Kept] = []
    written: list[Path] = []
    for path in args.files:
        try:
            devices.append(Kept.of(path))
            if args.out:
                continue
            written.append(devices[-1].plot(path.with_suffix(".png")).path)
        except (ImportError, OSError, ValueError) as error:
            return console.fail(PROG, f"no plot of {path}: {error}", args.json)
        if not args.json:
            print(written[-1])
    if args.out:
        torches = ", ".join(dict.fromkeys(kept.torch for kept in devices))
        facts = [("numbers", f"{', '.join(map(str, args.files))}; {NOT_MEASURED}"), ("torch that measured", torches)]

        def place(kept: Kept) -> Path:
            return Path(args.out / f"gpu-{kept.device}.png")

        written = gpu_report.write(PROG, args.out, devices, place, [], arguments, facts)
        if not args.json:
            print(*written, sep="\n")
    if args.json:
        console.show_json({"plots": [str(path) for path in written if path.suffix == ".png"]})
    return console.DONE

"""Draws the documents' pictures anew; that of `vllm-kvq check` only if a model is given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from proof.pictures import recording
from proof.pictures.explained import hit, page, transform
from proof.pictures.kl import generated, given, quality
from proof.pictures.speeds import capacity, gpu, in_flight, speed
from vllm_kvq.cli.logs import be_quiet

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: tuple[ModuleType, ...] = (quality, given, generated, speed, gpu, in_flight, page, hit, capacity, transform)
"""Each has `data()`, what it shows, and `draw(path)`."""


RECORDING = "check.svg"


def file_name(module: ModuleType) -> str:
    return f"{module.__name__.rpartition('.')[2]}.svg"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof pictures", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="DIR", help="folder for the SVG files (docs/pictures)"
    )
    parser.add_argument("--check", type=Path, metavar="MODEL", help="checkpoint folder, for check.svg")
    options = parser.parse_args(argv)
    be_quiet()
    options.out.mkdir(parents=True, exist_ok=True)
    for module in PICTURES:
        module.draw(options.out / file_name(module))
    if options.check:
        recording.draw(options.out / RECORDING, options.check)
    return 0

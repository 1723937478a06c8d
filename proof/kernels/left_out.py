"""Instruction sets that a build of the CPU kernels does without, to compile in less time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_kvq.cli.arguments import words
from vllm_kvq.kernels.cpu.library import ISAS

OPTIONAL = (*ISAS[1:-1], "amx")
"""A build always has the portable instruction set and the last of ISAS."""


def flags(without: Sequence[str]) -> list[str]:
    return [f"-DKVQ_WITHOUT_{isa.upper()}" for isa in without]


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without",
        type=words(OPTIONAL),
        default=[],
        metavar="ISA,...",
        help=f"instruction sets that take long to compile and that the command does not use, of {', '.join(OPTIONAL)}",
    )

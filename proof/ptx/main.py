"""Runs a Python command whose GPU kernels are compiled for a GPU, and run here from their PTX.

    python -m proof ptx -m pytest tests/triton tests/cuda            as compiled for sm_90
    python -m proof ptx --target 80 -m pytest tests/triton -k float64

Only in this process, so pytest gets no workers. The CUDA kernels need nvcc. Slower than Triton's interpreter by the
number of instructions. Kernels that multiply in Blackwell's tensor memory (sm_100) are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from proof import inside
from proof.ptx import emulate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof ptx", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", type=int, default=90, help="compute capability, as in 80")
    options = inside.parse(parser, argv)
    emulate(options.target)
    # no workers: they would be other processes, in which Triton's interpreter runs the kernels
    return inside.run(options.command, "-p no:xdist")

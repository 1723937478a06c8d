"""Runs a Python command whose GPU kernels are compiled for a GPU, and run here from their PTX.

    python -m proof ptx -m pytest tests/triton tests/cuda            as compiled for sm_90
    python -m proof ptx --target 80 -m pytest tests/triton -k float64

In this process alone, so pytest gets no workers. The CUDA kernels need nvcc. Slower than Triton's interpreter by the
number of instructions. Kernels that multiply in Blackwell's tensor memory (sm_100) are refused.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from proof.ptx import emulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof ptx", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=int, default=90, help="compute capability, as in 80")
    parser.add_argument("-m", dest="command", nargs=argparse.REMAINDER, required=True, help="a module, its arguments")
    args = parser.parse_args()
    if not args.command:
        parser.error("-m needs a module")
    # a worker would be another process, and take the interpreter without a word
    os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} -p no:xdist"
    emulate(args.target)
    sys.argv = args.command
    runpy.run_module(args.command[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

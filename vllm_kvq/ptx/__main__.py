"""Runs a Python command whose GPU kernels are compiled for a GPU, and run here from their PTX.

    python -m vllm_kvq.ptx -m pytest tests/triton -k float64            as compiled for sm_80
    python -m vllm_kvq.ptx --target 89 -m pytest tests/triton tests/cuda

nvcc is needed for the CUDA kernels.
Slower than Triton's interpreter by the number of instructions. Targets whose matrix instructions belong to a group of
warps (sm_90, sm_100) are refused where a kernel uses them.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from vllm_kvq.ptx import VARIABLE, cuda, driver


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_kvq.ptx", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=int, default=80, help="compute capability, as in 80")
    parser.add_argument("-m", dest="command", nargs=argparse.REMAINDER, required=True, help="a module, its arguments")
    args = parser.parse_args()
    if not args.command:
        parser.error("-m needs a module")
    os.environ[VARIABLE] = str(args.target)
    driver.install(args.target)
    cuda.install()
    sys.argv = args.command
    runpy.run_module(args.command[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

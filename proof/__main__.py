"""The instruments: python -m proof COMMAND, from a checkout. Each command lives in the module that does its work."""

from __future__ import annotations

import sys

from vllm_kvq.cli import run_module

MODULES = {
    "fuzz": ("proof.fuzz.main", "random traces on real engines, every token judged"),
    "soak": ("proof.soak.main", "a real server under mixed load for a while, then its errors, memory and blocks"),
    "demo": ("proof.demo.serve", "a real server with a low-bit cache, and an answer from it"),
    "ptx": ("proof.ptx.main", "a Python command whose GPU kernels run from their PTX, on a CPU"),
    "probe": ("proof.probe", "a Python command on a processor that is taken for one with AVX-512 VNNI"),
    "sanitize": ("proof.sanitize", "a command with the CPU kernels under g++'s sanitizers"),
    "instructions": ("proof.tables.instructions", "instructions of CPU attention per cached element, counted"),
    "compile": ("proof.tables.compile_table", "registers, spills and instructions of the GPU kernels"),
    "traffic": ("proof.tables.gpu_traffic", "what a GPU's decode kernels load per cached token, counted"),
    "models": ("proof.models.page", "docs/models.md"),
}


def main() -> int:
    args = sys.argv[1:]
    if args and args[0] in MODULES:
        return run_module(f"python -m proof {args[0]}", MODULES[args[0]][0], args[1:])
    print("usage: python -m proof COMMAND ...\n")
    print("\n".join(f"  {name:14}{what}" for name, (_, what) in MODULES.items()))
    return 0 if args in (["--help"], ["-h"]) else 2


# guarded: multiprocessing imports the main module again in its children
if __name__ == "__main__":
    raise SystemExit(main())

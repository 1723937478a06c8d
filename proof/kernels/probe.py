"""Counts the instructions of the CPU kernels, and runs those for VNNI on processors without it (csrc/probe).

    python -m proof probe -m pytest tests/kernels -k avx512

runs a Python command in a process whose kernels take the processor for one with AVX-512 VNNI and VBMI. A signal handler
executes the instructions that it lacks: the same results, thousands of times slower, enough for tests and for counting.
Other processes, and other libraries in this one, are not affected. x86-64 Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from proof import inside
from vllm_kvq.kernels.build import BuildError, build
from vllm_kvq.kernels.cpu.library import ISAS, isa


@functools.cache
def library() -> ctypes.CDLL:
    """Raises BuildError."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError("instructions can only be watched on x86-64 Linux")
    lib = ctypes.CDLL(str(build("probe")))
    lib.probe_count.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    lib.probe_counted.restype = ctypes.c_uint64
    return lib


def code_of(part: str) -> tuple[int, int]:
    """The addresses of the code of the one loaded library with `part` in its path."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    found = [x for x in lines if len(x) == 6 and "x" in x[1] and part in x[5]]
    if len({x[5] for x in found}) != 1:
        raise ValueError(f"not one but {len({x[5] for x in found})} loaded libraries are called {part}")
    bounds = [x[0].split("-") for x in found]
    return min(int(low, 16) for low, _ in bounds), max(int(high, 16) for _, high in bounds)


def count(step: Callable[[], object], code: tuple[int, int]) -> int:
    """How many instructions of `code` this thread executes in step()."""
    lib = library()
    lib.probe_count(*code)
    try:
        step()
    finally:
        counted = int(lib.probe_counted())
    return counted


def pretend() -> bool:
    """Loads our kernels as on a processor with VNNI and VBMI. False if that can't be done."""
    lib = library()
    build()  # before CPUID is answered here, because the compiler asks it, too
    if not lib.probe_pretend():
        return False
    try:
        return ISAS[isa()] == "avx512"
    finally:
        lib.probe_stop_pretending()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = inside.parse(parser, argv)
    try:
        if not pretend():
            print("this processor has no AVX-512, or CPUID can't be answered for it", file=sys.stderr)
            return 1
    except BuildError as error:
        print(str(error), file=sys.stderr)
        return 1
    # pytest's own handler would take SIGILL away from the probe's
    return inside.run(options.command, "-p no:faulthandler")

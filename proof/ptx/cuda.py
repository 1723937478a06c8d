"""csrc/cuda as nvcc compiles it: where the emulation would run a kernel lane by lane, its PTX runs instead."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

import numpy as np

from proof.kernels.cubin import one_kernel
from proof.ptx.grid import launch
from proof.ptx.machine import Step
from proof.ptx.memory import Tensors
from proof.ptx.parser import parse
from proof.ptx.program import Program
from proof.ptx.translate import translate
from vllm_kvq.kernels.gpu import loading


@functools.cache
def compiled(part: int, head_size: int) -> tuple[Program, list[Step]]:
    """Raises BuildError without nvcc."""
    with tempfile.TemporaryDirectory() as directory:
        path = one_kernel(loading.emulated or 90, head_size, part, Path(directory), "ptx")
        program = parse(path.read_text(encoding="utf-8"))
    return program, translate(program)


def run(
    part: int, head_size: int, x: int, y: int, threads: int, shared: int,
    params: int, nbytes: int, ranges: int, count: int,
) -> None:  # fmt: skip
    """A kernel of csrc/cuda/cubin.cu, its parameters as bytes, and the tensors' first and last addresses."""
    program, steps = compiled(part, head_size)
    ends = (ctypes.c_uint64 * (2 * count)).from_address(ranges)
    given = [(ends[2 * i], ends[2 * i + 1] - ends[2 * i]) for i in range(count)]
    given += [(data.ctypes.data, data.nbytes) for data in program.data.values()]
    block = np.frombuffer(ctypes.string_at(params, nbytes), np.uint8)
    launch(program, steps, (x, y, 1), threads, shared, block, Tensors(given))


def install() -> None:
    import tvm_ffi

    tvm_ffi.register_global_func("vllm_kvq.emulated_launch", run, override=True)

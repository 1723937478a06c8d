"""Runs compiled GPU kernels without a GPU: their PTX, instruction by instruction, on CPU tensors.

Triton's interpreter runs a kernel's source, and knows nothing about the compiler's output: which lane holds which
element, what goes through shared memory and between which barriers, inline assembly, widths and alignment of accesses.
This package runs the compiler's output. What it can't show: timing, caches, what ptxas does to PTX, and the order in
which a GPU's warps run (all warps of a block step together; races in shared memory are looked for and fail).

    parser.py       PTX text -> a program (program.py)
    translate.py    its instructions -> steps that a block of threads runs
    instructions/   what each of them does, by kind
    types.py        registers as numpy arrays, an entry per thread, and their bits as numbers
    machine.py      one block of threads: branches, barriers, asynchronous copies
    memory.py       tensors (bounds, alignment), shared memory (races)
    grid.py         a launch
    driver.py       for Triton: a driver whose GPU this is
    cuda.py         for csrc/cuda: its kernels, compiled by nvcc
"""

from __future__ import annotations


def emulate(target: int) -> None:
    """From now on this process (not its children) has a GPU of that compute capability (as in 80): this package."""
    from proof.ptx import cuda, driver
    from vllm_kvq.kernels.gpu import loading

    loading.emulated = target
    driver.install(target)
    cuda.install()

"""Runs compiled GPU kernels without a GPU: their PTX, instruction by instruction, on CPU tensors.

Triton's interpreter runs a kernel's source, and knows nothing of what the compiler makes of it: which lane holds which
element, what goes through shared memory and between which barriers, inline assembly, widths and alignment of accesses.
This package runs the compiler's output. What it can't show: timing, caches, what ptxas makes of PTX, and the order in
which a GPU's warps run (all warps of a block step together; races in shared memory are looked for and fail).

    program.py      PTX text -> instructions
    types.py        registers as numbers: numpy arrays, an entry per thread
    alu.py, warp.py what arithmetic, and the lanes of a warp together, make of such arrays
    memory.py       tensors (bounds, alignment), shared memory (races)
    machine.py      one block of threads: branches, barriers, asynchronous copies
    decode.py       instructions -> what a block runs (operands, arithmetic, accesses, collective)
    grid.py         a launch
    driver.py       a driver for Triton whose GPU this is
    cuda.py         the same for csrc/cuda, compiled by nvcc
"""

from __future__ import annotations


def emulate(target: int) -> None:
    """From now on this process (not its children) has a GPU, this package, of a compute capability, as in 80."""
    from proof.ptx import cuda, driver
    from vllm_kvq.kernels.gpu import loading

    loading.emulate(target)
    driver.install(target)
    cuda.install()

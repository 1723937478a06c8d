"""A driver for Triton whose GPU is this package: kernels are compiled as for an NVIDIA GPU, up to their PTX.

Triton asks its driver for a device, a stream, a target, and how to load and to launch a binary. Ours takes the PTX
as the binary (ptxas is never called) and launches it on CPU tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.ptx.grid import launch
from proof.ptx.machine import Step
from proof.ptx.memory import Tensors
from proof.ptx.parser import parse
from proof.ptx.program import Program
from proof.ptx.translate import translate
from proof.ptx.types import Array


class Utils:
    """The object that Triton calls `driver.active.utils`."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 99 << 10, "multiprocessor_count": 1, "warpSize": 32, "max_num_regs": 65536}

    @staticmethod
    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[int, object, int, int, int]:
        program = parse(binary.decode())
        return 1, (program, translate(program)), 0, 0, 1024

    @staticmethod
    def unload_module(module: object) -> None:
        """Nothing is held."""


def packed(program: Program, kinds: list[str], arguments: list[Any]) -> tuple[Array, list[tuple[int, int]]]:
    """The parameters' bytes, and the memory of those that are tensors."""
    block, ranges = bytearray(program.param_bytes), []
    for (at, size), kind, value in zip(program.params.values(), kinds, arguments, strict=False):
        if kind.startswith("*"):
            if value is not None:
                storage = value.untyped_storage()
                ranges.append((storage.data_ptr(), storage.nbytes()))
            data = struct.pack("<Q", 0 if value is None else value.data_ptr())
        elif kind == "fp32":
            data = struct.pack("<f", value)
        else:
            data = int(value).to_bytes(size, "little", signed=int(value) < 0)
        block[at : at + size] = data
    return np.frombuffer(bytes(block), np.uint8), ranges


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.kinds = list(source.signature.values())
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: tuple[Program, list[Step]], *rest: Any) -> None:
        # what comes before the kernel's arguments: packed metadata, launch metadata and two hooks
        program, steps = function
        given = [(k, a) for k, a in zip(self.kinds, rest[4:], strict=True) if k != "constexpr"]
        params, ranges = packed(program, [k for k, _ in given], [a for _, a in given])
        ranges += [(data.ctypes.data, data.nbytes) for data in program.data.values()]
        memory = Tensors(ranges)
        launch(program, steps, (x, y, z), 32 * self.metadata.num_warps, self.metadata.shared, params, memory)


class Driver:
    utils = Utils()
    launcher_cls = Launcher

    def __init__(self, target: int) -> None:
        self.target = target
        self.get_current_device: Callable[[], int] = lambda: 0
        self.get_current_stream: Callable[[int], int] = lambda device: 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.target, 32)


def _until_ptx(backend: Any = None, stages: Any = None, *rest: Any) -> tuple[str, str]:
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return "ptx", "ptx"


def install(target: int) -> None:
    """From now on Triton's kernels run here, in this process."""
    from triton import knobs
    from triton.runtime import driver

    knobs.runtime.add_stages_inspection_hook = _until_ptx
    driver.set_active(Driver(target))

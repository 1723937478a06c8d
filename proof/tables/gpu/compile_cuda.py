"""The CUDA kernels' rows of the compile table (`python -m proof compile`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proof.kernels.cubin import one_kernel
from proof.tables.gpu.sass import read_cubin, shortest_cycle


@dataclass(frozen=True)
class CudaVariant:
    """One kernel of csrc/cuda/cubin.cu."""

    name: str
    part: int
    head_size: int
    warps: int
    shared: int
    attends: bool = False


def variants() -> Iterator[CudaVariant]:
    for d in (64, 128, 256):
        warps, slab = (2 if d == 256 else 4), slab_bytes(d)
        for tiles in (1, 2):
            shared = warps * (2 * (64 + slab) + tiles * 48 * d)
            yield CudaVariant(f"attend qjl3 d={d} rows={8 * tiles}", tiles, d, warps, shared, True)
        for tiles in (1, 2):
            yield CudaVariant(f"query qjl3 d={d} rows={8 * tiles}", 2 + tiles, d, 4, 32 * tiles * (d + 1) + d // 4)
        yield CudaVariant(f"pack qjl3 d={d}", 5, d, 8, pack_bytes(d))


def slab_bytes(d: int) -> int:
    from vllm_kvq.formats import Geometry, get_format

    return get_format("qjl3").bind(Geometry(d, 64)).slab_region.nbytes


def pack_bytes(d: int) -> int:
    """`Pack<D>::SHARED` of csrc/cuda/pack.h."""
    return 144 * (d + d // 16) + 4 * 3 * d + 4 * d + 9 * 128 + 4 * (d // 16) + 4 * d + 8 * d + 256


def build(variant: CudaVariant, target: int, directory: Path) -> Path:
    return one_kernel(target, variant.head_size, variant.part, directory)


def inner_loop(variant: CudaVariant, target: int, directory: Path) -> list[str]:
    """The instructions of an attention kernel's inner loop."""
    return shortest_cycle(read_cubin(str(build(variant, target, directory)))[2])

"""How the Triton kernels are launched: rows and slabs of a program, warps, registers.

Found with `python -m proof compile`, whose --check fails on a spill; a GPU may know better.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.innerq import HybridKeys
from vllm_kvq.formats.polar import PolarKeys
from vllm_kvq.formats.squat import ChannelKeys, SQuatKeys

MIN_ROWS, MAX_ROWS = 8, 16
"""Rows (queries times query heads of one KV head) of a program that decodes. With more, each of its warps would unpack
it all."""


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def old_triton() -> bool:
    """Before 3.7 (torch 2.11 has 3.6): what lies in which lane, and how many registers it takes, is another matter."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)


@dataclass(frozen=True)
class Launch:
    warps: int
    turn: int = 1
    """Slabs of one page that a turn of decode's loop attends: the more, the fewer maxima, page numbers, parameters."""
    extra: int = 16
    """Rows of InnerQ's denominators that are kept: they are equal, and a product has 16. Half of them takes fewer
    registers."""
    stages: int = 1
    """Of loads under way. With more than one Triton copies through shared memory what a lane could load for itself."""
    free: bool = True
    """Whether a thread may take all registers that there are: else ptxas may spill a few for one warp more."""
    fused: bool = True
    """Whether products may be rounded together with the sums they enter. Not where bytes are made: lanes with copies of
    one sum of products would round it each in its own way, and choose codes by it (InnerQ's mode)."""

    @property
    def options(self) -> dict[str, int]:
        limit = {"maxnreg": min(255, 2048 // self.warps)} if self.free else {}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused} | limit


def most_rows(fmt: PageFormat) -> int:
    """16 only where a program of 16 rows takes fewer instructions than two of 8 (docs/kernels.md)."""
    few = isinstance(fmt.keys, (ChannelKeys, HybridKeys)) and fmt.geometry.d > 128
    return MIN_ROWS if few else MAX_ROWS


def rows_for(fmt: PageFormat, rows: int) -> int:
    """Rows per program: all of a decode step, a tile of a longer chunk."""
    return min(most_rows(fmt), max(MIN_ROWS, power_of_two(rows)))


def attend_launch(fmt: PageFormat, rows: int, chip: int, table: int = 0) -> Launch:
    """One warp keeps every product within a warp, and two slabs in a turn are fewer instructions. Where that needs more
    registers than a thread has, it is one slab, or more warps."""
    k, d = fmt.keys, fmt.geometry.d
    if table:
        return Launch(max(2, d // 32))
    if d > 128 and rows > MIN_ROWS:
        return Launch(2)
    few_bits = isinstance(k, ChannelKeys) and k.bits == 2
    crowded = (d > 64 and rows > MIN_ROWS) or (d > 128 and not few_bits)
    # found by trying, as below: what spills differs from chip to chip
    crowded |= isinstance(k, PolarKeys) and not k.nibbles and d == 128 and 100 <= chip < 120
    half = isinstance(k, HybridKeys) and (old_triton() or (d > 128 and chip < 100))
    return Launch(1, 1 if crowded or fmt.slabs % 2 else 2, extra=8 if half else 16)


def pack_launch(fmt: PageFormat, capability: int) -> Launch:
    """4 warps for a slab, more where SQuat's subspace takes registers; a page of PolarQuant is sorted as a whole."""
    k, d = fmt.keys, fmt.geometry.d
    if isinstance(k, SQuatKeys) and k.bits * d > 256:
        # found by trying: what spills differs from chip to chip, and from 9.0 on it is a larger limit that makes it
        if capability < 90 or old_triton():
            return Launch(16 if d > 128 else 8, stages=3, fused=False)
        return Launch(4 if d <= 128 and capability >= 100 else 8, stages=3, free=False, fused=False)
    if not k.page_wide:
        return Launch(4, stages=3, fused=False)
    return Launch(min(16, max(4 if d < 128 else 8, power_of_two(fmt.unit) // 16)), stages=3, fused=False)


SLOT_LAUNCH = Launch(4, stages=3, fused=False)
"""Of what writes states, sinks and rings."""


def merge_launch(parts: int) -> Launch:
    return Launch(1 if parts <= 8 else 4, stages=3, free=False)


def raw_rows(fmt: PageFormat, rows: int) -> int:
    """Rows of a program of the full-precision part."""
    return min(32 if fmt.geometry.d > 128 else 64, max(16, power_of_two(rows)))


def raw_launch(fmt: PageFormat) -> Launch:
    return Launch(8 if fmt.geometry.d > 128 else 4)

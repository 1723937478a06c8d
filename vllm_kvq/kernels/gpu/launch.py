"""How a Triton kernel is launched: warps, registers, rows of a program. What depends on a codec is in triton/codecs.py.

Found with `python -m proof compile`, whose --check fails on a spill; measurements on a GPU may suggest other values.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kvq.formats import PageFormat

MIN_ROWS, MAX_ROWS = 8, 16
"""Rows (queries times query heads of one KV head) of a program that attends pages. With more rows, each of its warps
would unpack everything."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def largest_power(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


@dataclass(frozen=True)
class Launch:
    warps: int
    turn: int = 1
    """Slabs of one page per iteration of attend's loop: more of them need fewer maxima, page numbers and parameters."""
    extra: int = 16
    """Rows of InnerQ's denominators that are kept: they are equal, and a product has 16. Half of them need fewer
    registers."""
    stages: int = 1
    """Stages of pending loads. With more than one, Triton copies data through shared memory that lanes could load."""
    free: bool = True
    """Whether a thread may use all registers that exist: otherwise ptxas may spill a few to fit one more warp."""
    fused: bool = True
    """Whether products may be fused with the sums they enter. Not when packing: lanes that hold copies of one sum of
    products would each round it differently, and choose codes by it (InnerQ's mode)."""

    @property
    def options(self) -> dict[str, int]:
        limit = {"maxnreg": min(255, 2048 // self.warps)} if self.free else {}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused} | limit


SLOT_LAUNCH = Launch(4, stages=3, fused=False)
"""Launch of the kernels that write states, sinks and rings."""


def merge_launch(parts: int) -> Launch:
    return Launch(1 if parts <= 8 else 4, stages=3, free=False)


def unpack_launch(fmt: PageFormat) -> Launch:
    return Launch(8 if fmt.geometry.d > 128 else 4, stages=2, free=False)


def full_precision_rows(fmt: PageFormat, rows: int) -> int:
    """Rows of a program that attends tokens in full precision."""
    return min(32 if fmt.geometry.d > 128 else 64, max(16, power_of_two(rows)))


def full_precision_launch(fmt: PageFormat) -> Launch:
    return Launch(8 if fmt.geometry.d > 128 else 4)

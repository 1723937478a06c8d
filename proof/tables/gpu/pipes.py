"""Which unit of a multiprocessor carries out an instruction of SASS, and how many lanes that unit has.

Rates per clock and multiprocessor: the table of arithmetic throughput in NVIDIA's CUDA C++ Programming Guide; loads and
stores: the architectures' white papers. Four schedulers of a multiprocessor issue one instruction of a warp each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

PIPES = ("tensor", "sfu", "lsu", "fma", "alu", "other")
TENSOR = ("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")
SFU = ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO")
"""Instructions at 16 lanes per clock: functions, and conversions to and from integers."""
LSU = ("LD", "ST", "SHFL", "ATOM", "RED")
FMA = ("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2", "IMAD")
OTHER = (
    "BRA", "BRX", "BSSY", "BSYNC", "BREAK", "EXIT", "RET", "CALL", "NOP", "WARPSYNC", "BAR", "DEPBAR", "MEMBAR",
    "YIELD", "R2UR", "S2R", "S2UR", "CS2R", "CCTL", "ARRIVES",
)  # fmt: skip
"""Issued, and carried out in parallel with the other units; uniform instructions (U...) too."""

LANES = {"sfu": 16, "lsu": 32, "fma": 128, "alu": 64}
"""Per clock and multiprocessor, on compute capability 8.9 to 10.0. The matrix units' rate is a chip's."""
SCHEDULERS = 4
PRODUCT = 16 * 8 * 16
"""Multiply-adds of one matrix instruction (m16n8k16)."""


def pipe(instruction: str) -> str:
    """The pipe of one instruction, with or without a predicate. What is not named above goes to the ALU."""
    name = re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]
    if name in TENSOR:
        return "tensor"
    if name in OTHER or name.startswith("U"):
        return "other"
    if name in SFU:
        return "sfu"
    if name.startswith(LSU):
        return "lsu"
    return "fma" if name in FMA else "alu"


def count(loop: Iterable[str]) -> dict[str, int]:
    found = Counter(pipe(instruction) for instruction in loop)
    return {name: found[name] for name in PIPES}


def cycles(counts: dict[str, float], products: float) -> dict[str, float]:
    """Clocks that a multiprocessor takes for these instructions of a warp, by unit and for the issue of all.

    `products`: multiply-adds of its matrix units per clock.
    """
    taken = {name: 32 * counts[name] / lanes for name, lanes in LANES.items()}
    return taken | {
        "tensor": counts["tensor"] * PRODUCT / products,
        "issue": sum(counts.values()) / SCHEDULERS,
    }

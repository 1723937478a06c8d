"""Operands looked up once, types chosen once: what an instruction does is a function of a block's registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from proof.ptx.machine import Block
from proof.ptx.program import Address, Instruction, Operand, Pair, Program, Register, Sink, Unsupported, Vector
from proof.ptx.types import Array, Read, is_type, reader

SPECIALS = tuple(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + ["%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"]
)
Values = Callable[[list[Any]], tuple[Array, ...]]
Act = Callable[[Block, Array], "tuple[Array, ...] | None"]


@dataclass(frozen=True)
class Pure:
    """The values of the target registers, computed only from registers."""

    targets: tuple[int, ...]
    values: Values


@dataclass(frozen=True)
class Effect:
    """Anything else, in the threads of a mask."""

    targets: tuple[int, ...]
    act: Act


def slots(targets: list[Register | None]) -> tuple[int, ...]:
    return tuple(t.slot for t in targets if t is not None)


class Operands:
    """A program's operands, as its instructions read and write them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        # of a variable, or in its own space
        self.addresses = {name: data.ctypes.data for name, data in program.data.items()} | program.shared
        self.addresses |= {name: at for name, (at, _) in program.params.items()}
        self.special = {name: len(program.bits) + i for i, name in enumerate(SPECIALS)}

    def read(self, operand: Operand, kind: str) -> Read:
        return reader(operand, kind, self.addresses, self.special)

    def targets(self, operand: Operand, i: Instruction) -> list[Register | None]:
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        if isinstance(operand, Pair):
            parts = (operand.first, operand.second)
        for p in parts:
            if not isinstance(p, (Register, Sink)):
                raise Unsupported("not known here")
        return [p if isinstance(p, Register) else None for p in parts]

    def kind_of(self, i: Instruction) -> str:
        kinds = [m for m in i.mods if is_type(m)]
        if not kinds:
            raise Unsupported("not known here")
        return kinds[-1]

    def address(self, operand: Operand, i: Instruction) -> Read:
        if not isinstance(operand, Address):
            raise Unsupported("not known here")
        kind = f"u{operand.base.bits}" if isinstance(operand.base, Register) else "u64"
        base, offset = self.read(operand.base, kind), operand.offset
        # an address of 64 bits may be below its base
        return lambda r: (base(r).astype(np.int64) + offset).view(np.uint64)

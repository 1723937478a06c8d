"""Lanes as numpy arrays: how a register's bits are read in an instruction's type, and written back.

A register is an array of one entry per thread, or of one entry where all threads have the same: bool for predicates,
else unsigned of its width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.ptx.program import Immediate, Negated, Operand, Register, Special, Symbol, Unsupported

Array = np.ndarray[Any, Any]
Read = Callable[[list[Any]], Array]
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
PACKED = {"f16x2": 32, "bf16x2": 32, "s16x2": 32, "u16x2": 32, "f32x2": 64}
NUMBERS: dict[str, Any] = {
    f"{k}{b}": of[b] for k, of in zip("bus", (UNSIGNED, UNSIGNED, SIGNED), strict=True) for b in of
}
NUMBERS |= {f"f{b}": FLOATS[b] for b in FLOATS}
HALVES: dict[str, Any] = {"f16x2": np.float16, "s16x2": np.int16, "u16x2": np.uint16, "f32x2": np.float32}


def bits_of(kind: str) -> int:
    return PACKED.get(kind) or int(kind.lstrip("busf") if kind != "bf16" else 16)


def is_type(mod: str) -> bool:
    return mod in ("pred", "bf16", "tf32", *PACKED) or (mod[0] in "busf" and mod[1:] in ("8", "16", "32", "64"))


def float_of_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_of_float(x: Array) -> Array:
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def typed(bits: Array, kind: str) -> Array:
    """Bits of at least the type's width, as numbers; packed types become (threads, 2)."""
    if kind == "pred":
        return bits
    width = bits_of(kind)
    bits = bits.astype(UNSIGNED[width], copy=False)
    if kind == "bf16":
        return float_of_bf16(bits)
    if kind == "bf16x2":
        return float_of_bf16(bits.view(np.uint16).reshape(-1, 2))
    if kind in PACKED:
        return bits.view(HALVES[kind]).reshape(-1, 2)
    if kind[0] == "s":
        return bits.view(SIGNED[width])
    if kind[0] == "f":
        return bits.view(FLOATS[width])
    return bits


def untyped(x: Array, kind: str, width: int) -> Array:
    """Numbers as the bits of a register of `width`: narrower integers are extended as their sign says."""
    if kind == "pred":
        return x
    if kind == "bf16":
        bits = bf16_of_float(x)
    elif kind == "bf16x2":
        bits = bf16_of_float(x).reshape(-1, 2).view(np.uint32).reshape(-1)
    elif kind in PACKED:
        bits = np.ascontiguousarray(x, HALVES[kind]).view(UNSIGNED[PACKED[kind]]).reshape(-1)
    elif kind[0] == "f":
        bits = np.ascontiguousarray(x, FLOATS[bits_of(kind)]).view(UNSIGNED[bits_of(kind)])
    elif kind[0] == "s":
        return x.astype(SIGNED[max(width, bits_of(kind))], copy=False).view(UNSIGNED[max(width, bits_of(kind))])
    else:
        bits = x
    return bits.astype(UNSIGNED[width], copy=False)


def writer(kind: str, width: int) -> Callable[[Array], Array]:
    """`untyped` with its choices made."""
    number = NUMBERS.get(kind)
    if number is None or bits_of(kind) != width:
        return lambda x: untyped(x, kind, width)
    bits = UNSIGNED[width]
    return lambda x: x.astype(number, copy=False).view(bits)


def constant(operand: Immediate, width: int) -> Array:
    bits = operand.bits
    if operand.floating == 64 and width == 32:  # a literal like 1.0 in a 32-bit instruction
        return np.array([bits], np.uint64).view(np.float64).astype(np.float32).view(np.uint32)
    return np.array([bits & ((1 << width) - 1)], UNSIGNED[width])


def reader(operand: Operand, kind: str, addresses: dict[str, int], special: dict[str, int]) -> Read:
    """A function from the registers to the operand as numbers of a type. `special` has slots of special registers."""
    if isinstance(operand, Negated):
        slot = operand.register.slot
        return lambda r: ~r[slot]
    if isinstance(operand, (Register, Special)):
        at = operand.slot if isinstance(operand, Register) else special[operand.name]
        if kind == "pred":
            return lambda r: r[at]
        number = NUMBERS.get(kind)
        if number is not None and isinstance(operand, Register) and operand.bits == bits_of(kind):
            return (lambda r: r[at]) if kind[0] in "bu" else (lambda r: r[at].view(number))
        return lambda r: typed(r[at], kind)
    if isinstance(operand, Immediate):
        value = constant(operand, 8) != 0 if kind == "pred" else typed(constant(operand, bits_of(kind)), kind)
        return lambda r: value
    if isinstance(operand, Symbol):
        place = np.array([addresses[operand.name]], UNSIGNED[bits_of(kind)])
        return lambda r: place
    raise Unsupported(f"operand {operand}")

"""What an instruction makes of its operands, thread by thread: integers, floats, conversions, comparisons.

Approximations (`.approx`) are exact here, and fused products are rounded from float64: closer to the mathematics than
a GPU, by less than an approximation's own error. Subnormal float32 are flushed where the instruction says `.ftz`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.ptx.program import Unsupported
from proof.ptx.types import SIGNED, UNSIGNED, Array, bits_of

Function = Callable[..., Array]
TINIEST = np.finfo(np.float32).tiny


def flushed(x: Array) -> Array:
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < TINIEST, np.copysign(np.float32(0), x), x)


def fused(a: Array, b: Array, c: Array) -> Array:
    kind = c.dtype
    if kind == np.float64:
        return a * b + c
    return (a.astype(np.float64) * b + c).astype(kind)


def shift_left(x: Array, by: Array) -> Array:
    width = x.dtype.itemsize * 8
    by = by.astype(np.uint64)
    moved = x.astype(np.uint64) << np.minimum(by, np.uint64(63))
    return np.where(by < width, moved, np.uint64(0)).astype(x.dtype)


def shift_right(x: Array, by: Array) -> Array:
    """Arithmetic for signed x; all the way for amounts beyond the width."""
    width = x.dtype.itemsize * 8
    by = np.minimum(by.astype(np.uint64), np.uint64(width))
    if x.dtype.kind == "i":
        return (x >> np.minimum(by, np.uint64(width - 1)).astype(x.dtype)).astype(x.dtype)
    wide = x.astype(np.uint64) >> np.minimum(by, np.uint64(63))
    return np.where(by < width, wide, np.uint64(0)).astype(x.dtype)


def product_high(a: Array, b: Array) -> Array:
    width = a.dtype.itemsize * 8
    if width < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(width)).astype(a.dtype)
    exact = (a.astype(object) * b.astype(object)) >> 64
    return np.array([int(x) & (2**64 - 1) for x in exact], np.uint64).view(a.dtype)


def wide_product(a: Array, b: Array) -> Array:
    wide = (SIGNED if a.dtype.kind == "i" else UNSIGNED)[a.dtype.itemsize * 16]
    return a.astype(wide) * b.astype(wide)


PRODUCTS: dict[str, Function] = {"lo": np.multiply, "hi": product_high, "wide": wide_product}


def quotient(a: Array, b: Array) -> Array:
    """Towards zero."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(b == 0, a.dtype.type(2 ** (a.dtype.itemsize * 8) - 1), a // safe)
    whole = np.abs(a.astype(object)) // np.abs(safe.astype(object))
    signed = whole * np.where((a < 0) != (b < 0), -1, 1)
    return np.where(b == 0, -1, signed).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    return a - quotient(a, b) * b


def permuted(a: Array, b: Array, select: Array) -> Array:
    """prmt: four bytes of the eight of b:a, or their signs."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast(both, select).shape, np.uint32)
    for i in range(4):
        choice = (select >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        byte = np.where(choice >= 8, np.where(byte >= 128, np.uint64(255), np.uint64(0)), byte)
        out = out | (byte.astype(np.uint32) << np.uint32(8 * i))
    return out


def logic(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: bit i of `table` is the result for a, b, c = the bits of i."""
    out = np.zeros(1, np.uint32)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return out


def field(x: Array, at: Array, count: Array) -> Array:
    """bfe: `count` bits from `at` on, sign-extended from the last that there is for signed x."""
    width = x.dtype.itemsize * 8
    at, count = (at & np.uint32(255)).astype(np.int64), (count & np.uint32(255)).astype(np.int64)
    moved = shift_right(x, at)
    keep = np.clip(width - count, 0, width)
    if x.dtype.kind == "i":
        cut = np.where(count == 0, x.dtype.type(0), shift_right(shift_left(moved.view(x.dtype), keep), keep))
        return cut.astype(x.dtype)
    return np.where(count == 0, x.dtype.type(0), shift_right(shift_left(moved, keep), keep)).astype(x.dtype)


def inserted(x: Array, into: Array, at: Array, count: Array) -> Array:
    """bfi."""
    ones = shift_right(np.full(1, -1).astype(x.dtype), np.clip(x.dtype.itemsize * 8 - count.astype(np.int64), 0, 64))
    mask = np.where(count == 0, x.dtype.type(0), shift_left(ones, at))
    return (into & ~mask) | (shift_left(x, at) & mask)


def funnel(left: bool, wrap: bool) -> Function:
    def shift(low: Array, high: Array, by: Array) -> Array:
        by = (by & np.uint32(31) if wrap else np.minimum(by, np.uint32(32))).astype(np.uint64)
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        if left:
            return ((both << by) >> np.uint64(32)).astype(np.uint32)
        return (both >> by).astype(np.uint32)

    return shift


def reversed_bits(x: Array) -> Array:
    out = np.zeros_like(x)
    for i in range(x.dtype.itemsize * 8):
        out |= ((x >> x.dtype.type(i)) & x.dtype.type(1)) << x.dtype.type(x.dtype.itemsize * 8 - 1 - i)
    return out


def leading_zeros(x: Array) -> Array:
    width = x.dtype.itemsize * 8
    return np.array([width - int(v).bit_length() for v in x], np.uint32)


def least(largest: bool, nan: bool) -> Function:
    """Of floats: without `.NaN` a number wins over NaN."""
    if nan:
        return np.maximum if largest else np.minimum
    return np.fmax if largest else np.fmin


COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str, kind: str) -> Function:
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in COMPARE:
        if name == "ne" and (kind[0] == "f" or kind == "bf16"):  # ordered, unlike numpy's
            return lambda a, b: (a < b) | (a > b)
        return COMPARE[name]
    ordered = COMPARE[name[:-1]] if name.endswith("u") else None
    if ordered is None:
        raise Unsupported(f"comparison {name}")
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def conversion(mods: tuple[str, ...], to: str, of: str) -> Function:
    """cvt between numbers of two types; floats that don't fit an integer are clamped, NaN becomes 0."""
    rounding = next((ROUNDINGS[m] for m in mods if m in ROUNDINGS), None)
    to_float, of_float = to[0] == "f" or to == "bf16", of[0] == "f" or of == "bf16"
    if of_float and not to_float:
        info: Any = np.iinfo((SIGNED if to[0] == "s" else UNSIGNED)[bits_of(to)])

        def to_integer(x: Array) -> Array:
            whole = (rounding or np.trunc)(x.astype(np.float64))
            whole = np.where(np.isnan(whole), 0.0, whole)
            inside = np.clip(whole, float(info.min), float(info.max))
            top = inside >= float(info.max)  # which, with 64 bits, is no float64
            return np.where(top, info.max, np.where(top, 0.0, inside).astype(info.dtype)).astype(info.dtype)

        return to_integer
    if to_float:
        if "rz" in mods or "rm" in mods or "rp" in mods:
            raise Unsupported(f"cvt with rounding {mods}")
        target: Any = {"f16": np.float16, "f64": np.float64}.get(to, np.float32)
        saturate = "sat" in mods

        def to_number(x: Array) -> Array:
            if rounding is not None:
                x = rounding(x)
            y = x.astype(target)
            return np.clip(np.where(np.isnan(y), target(0), y), target(0), target(1)) if saturate else y

        return to_number
    if "sat" in mods:
        raise Unsupported("cvt.sat of integers")
    whole: Any = (SIGNED if to[0] == "s" else UNSIGNED)[bits_of(to)]
    return lambda x: x.astype(whole)


UNARY: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "rcp": lambda x: x.dtype.type(1) / x,
}


def function(name: str, mods: tuple[str, ...], kind: str) -> Function:
    """An arithmetic instruction on numbers of its type."""
    floating = kind[0] == "f" or kind.startswith("bf16")
    if name in UNARY:
        return UNARY[name]
    simple: dict[str, Function] = {
        "add": np.add,
        "sub": np.subtract,
        "neg": np.negative,
        "abs": np.abs,
        "not": np.invert,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shl": shift_left,
        "shr": shift_right,
        "prmt": permuted,
        "lop3": logic,
        "bfe": field,
        "bfi": inserted,
        "brev": reversed_bits,
        "clz": leading_zeros,
        "popc": lambda x: np.bitwise_count(x).astype(np.uint32),
        "copysign": lambda sign, x: np.copysign(x, sign),
        "rem": remainder,
        "cvta": lambda x: x,
    }
    if name in ("min", "max"):
        if floating:
            pick = least(name == "max", "NaN" in mods)
            return lambda a, b, *more: pick(pick(a, b), more[0]) if more else pick(a, b)
        return np.maximum if name == "max" else np.minimum
    if name == "div":
        return np.divide if floating else quotient
    if name == "mul":
        if floating:
            return np.multiply
        return PRODUCTS[mods[0]]
    if name == "fma" or (name == "mad" and floating):
        return fused
    if name == "mad":
        times = PRODUCTS[mods[0]]
        return lambda a, b, c: times(a, b) + c
    if name == "shf":
        return funnel(mods[0] == "l", mods[1] == "wrap")
    if name in simple:
        if name in ("add", "sub") and ("cc" in mods or "sat" in mods):
            raise Unsupported(f"{name} with {mods}")
        return simple[name]
    raise Unsupported(f"instruction {'.'.join((name, *mods))}")

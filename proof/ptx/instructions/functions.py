"""The function that an instruction applies to its operands, thread by thread: by name, modifiers and type.

Approximations (`.approx`) are exact here, and fused products are rounded from float64: closer to the mathematics than
a GPU, by less than an approximation's own error. Subnormal float32 are flushed where the instruction says `.ftz`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.ptx.instructions import integers
from proof.ptx.instructions.integers import Function
from proof.ptx.program import Unsupported
from proof.ptx.types import SIGNED, UNSIGNED, Array, bits_of

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


def least(largest: bool, nan: bool) -> Function:
    """The smallest or largest; for floats a number wins over NaN, except with `.NaN`."""
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
            top = inside >= float(info.max)  # with 64 bits, info.max is not a float64
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
        "shl": integers.shift_left,
        "shr": integers.shift_right,
        "prmt": integers.permuted,
        "lop3": integers.logic,
        "bfe": integers.field,
        "bfi": integers.inserted,
        "brev": integers.reversed_bits,
        "clz": integers.leading_zeros,
        "popc": lambda x: np.bitwise_count(x).astype(np.uint32),
        "copysign": lambda sign, x: np.copysign(x, sign),
        "rem": integers.remainder,
        "cvta": lambda x: x,
    }
    if name in ("min", "max"):
        if floating:
            pick = least(name == "max", "NaN" in mods)
            return lambda a, b, *more: pick(pick(a, b), more[0]) if more else pick(a, b)
        return np.maximum if name == "max" else np.minimum
    if name == "div":
        return np.divide if floating else integers.quotient
    if name == "mul":
        if floating:
            return np.multiply
        return integers.PRODUCTS[mods[0]]
    if name == "fma" or (name == "mad" and floating):
        return fused
    if name == "mad":
        times = integers.PRODUCTS[mods[0]]
        return lambda a, b, c: times(a, b) + c
    if name == "shf":
        return integers.funnel(mods[0] == "l", mods[1] == "wrap")
    if name in simple:
        if name in ("add", "sub") and ("cc" in mods or "sat" in mods):
            raise Unsupported(f"{name} with {mods}")
        return simple[name]
    raise Unsupported(f"instruction {'.'.join((name, *mods))}")

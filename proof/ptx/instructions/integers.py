"""Integer instructions as functions of numpy arrays, thread by thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proof.ptx.types import SIGNED, UNSIGNED, Array

Function = Callable[..., Array]


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

"""Operations of all lanes of a warp together. Registers are (warps, 32) arrays.

Lane 4 g + t of a product m16n8k16 holds, of the left operand, columns 2 t, 2 t + 1 (and 8 more) of rows g and g + 8; of
the right one, the same rows of column g; of the sum, columns 2 t and 2 t + 1 of rows g and g + 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proof.ptx.program import Unsupported
from proof.ptx.types import Array, float_of_bf16

LANES = np.arange(32, dtype=np.int64)


def shuffle(mode: str, x: Array, by: Array, control: Array) -> tuple[Array, Array]:
    """shfl: what each lane gets, and whether its source lay in range."""
    clamp, segment = (control & 31).astype(np.int64), (control >> 8 & 31).astype(np.int64)
    by = (by & 31).astype(np.int64)
    most = (LANES & segment) | (clamp & ~segment)
    least = LANES & segment
    if mode == "up":
        source = LANES - by
        inside = source >= most
    elif mode == "down":
        source = LANES + by
        inside = source <= most
    elif mode == "bfly":
        source = LANES ^ by
        inside = source <= most
    else:
        source = least | (by & ~segment)
        inside = source <= most
    inside = np.broadcast_to(inside, x.shape)
    return np.take_along_axis(x, np.where(inside, source, LANES), axis=1), inside


def halves(x: Array, kind: str) -> Array:
    """(warps, 32) registers of two numbers -> (warps, 32, 2)."""
    x = np.ascontiguousarray(x)
    if kind == "f16":
        return x.view(np.float16).reshape(*x.shape, 2).astype(np.float64)
    return float_of_bf16(x.view(np.uint16).reshape(*x.shape, 2)).astype(np.float64)


def tf32(x: Array) -> Array:
    """Tensor cores ignore the last 13 bits."""
    return (np.ascontiguousarray(x) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def operands(shape: str, kind: str, a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, Array]:
    """Registers -> the left operand (warps, 16, k) and the right one (warps, k, 8)."""
    w = len(a[0])
    each = {"f16": 2, "bf16": 2, "tf32": 1}.get(kind)
    if each is None or not shape.startswith("m16n8k") or int(shape[6:]) != 8 * each * (len(a) // 2) // 2:
        raise Unsupported(f"mma.{shape} of {kind}")
    unpack = (lambda x: tf32(x)[..., None]) if each == 1 else (lambda x: halves(x, kind))
    k = int(shape[6:])
    parts = np.stack([unpack(x) for x in a], 1).reshape(w, len(a) // 2, 2, 8, 4, each)  # column half, row half, g, t, e
    left = parts.transpose(0, 2, 3, 1, 4, 5).reshape(w, 16, k)
    if not b:
        return left, left
    parts = np.stack([unpack(x) for x in b], 1).reshape(w, len(b), 8, 4, each)  # row half, g, t, e
    return left, parts.transpose(0, 1, 3, 4, 2).reshape(w, k, 8)


def product(shape: str, kind: str, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
    """mma with a float32 sum: c + a @ b, in the same lanes as c."""
    w = len(a[0])
    left, right = operands(shape, kind, a, b)
    start = np.stack([np.ascontiguousarray(x).view(np.float32) for x in c], 1).astype(np.float64)
    sums = start.reshape(w, 2, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(w, 16, 8) + left @ right
    done = sums.reshape(w, 2, 8, 4, 2).transpose(0, 1, 4, 2, 3).reshape(w, 4, 32).astype(np.float32)
    return [np.ascontiguousarray(done[:, i]).view(np.uint32) for i in range(4)]


def transposed(rows: Array, flip: bool) -> Array:
    """ldmatrix: rows (warps, 8, 8) of 16-bit numbers -> registers (warps, 32)."""
    matrix = rows.transpose(0, 2, 1) if flip else rows
    return np.ascontiguousarray(matrix.reshape(-1, 32, 2)).view(np.uint32)[..., 0]


def reduced(name: str, x: Array) -> Array:
    """redux: one number for the warp."""
    each = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    if name not in each:
        raise Unsupported(f"redux.{name}")
    return np.broadcast_to(each[name].reduce(x, axis=1, keepdims=True).astype(x.dtype), x.shape)


def vote(name: str, x: Array) -> Array:
    if name == "ballot":
        bits = (x.astype(np.uint64) << LANES.astype(np.uint64)).sum(1, keepdims=True).astype(np.uint32)
        return np.broadcast_to(bits, x.shape)
    if name not in ("any", "all", "uni"):
        raise Unsupported(f"vote.{name}")
    some, every = x.any(1, keepdims=True), x.all(1, keepdims=True)
    return np.broadcast_to({"any": some, "all": every, "uni": every | ~some}[name], x.shape)

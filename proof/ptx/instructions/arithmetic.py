"""Instructions whose results depend only on registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.ptx.instructions import functions
from proof.ptx.instructions.operands import Operands, Pure, slots
from proof.ptx.program import Instruction, Operand, Vector
from proof.ptx.types import PACKED, UNSIGNED, Array, bits_of, is_type, untyped, writer


def plain(o: Operands, i: Instruction) -> Pure:
    kind = o.kind_of(i)
    mods = tuple(m for m in i.mods if m != kind)
    work = functions.function(i.name, mods, kind)
    (target,) = o.targets(i.operands[0], i)
    assert target is not None
    kinds = [kind] * (len(i.operands) - 1)
    out = kind
    if i.name in ("shl", "shr"):
        kinds[1] = "u32"
    if i.name in ("bfe", "bfi"):
        kinds[-2:] = ["u32", "u32"]
    if i.name in ("popc", "clz"):
        out = "u32"
    if "wide" in mods:
        out = f"{kind[0]}{2 * bits_of(kind)}"
        if i.name == "mad":
            kinds[2] = out
    reads = [o.read(x, k) for x, k in zip(i.operands[1:], kinds, strict=True)]
    ftz, saturate = "ftz" in mods, "sat" in mods
    write = writer(out, target.bits)
    if len(reads) == 2 and not ftz and not saturate:  # most of them
        first, second = reads
        return Pure((target.slot,), lambda r: (write(work(first(r), second(r))),))

    def values(r: list[Any]) -> tuple[Array]:
        arguments = [read(r) for read in reads]
        if ftz:
            arguments = [functions.flushed(a) for a in arguments]
        x = work(*arguments)
        if ftz:
            x = functions.flushed(x)
        if saturate:
            x = np.clip(np.where(np.isnan(x), x.dtype.type(0), x), x.dtype.type(0), x.dtype.type(1))
        return (write(x),)

    return Pure((target.slot,), values)


def mov(o: Operands, i: Instruction) -> Pure:
    to, of = i.operands
    if isinstance(to, Vector) or isinstance(of, Vector):
        return repack(o, i, to, of)
    (target,) = o.targets(to, i)
    assert target is not None
    read = o.read(of, "pred" if target.bits == 1 else f"b{target.bits}")
    return Pure((target.slot,), lambda r: (read(r),))


def repack(o: Operands, i: Instruction, to: Operand, of: Operand) -> Pure:
    """mov between one register and several narrower ones."""
    whole = bits_of(o.kind_of(i))
    if isinstance(of, Vector):
        (target,) = o.targets(to, i)
        assert target is not None
        each = whole // len(of.parts)
        reads = [o.read(p, f"b{each}") for p in of.parts]

        def join(r: list[Any]) -> tuple[Array]:
            out: Array = np.zeros(1, UNSIGNED[whole])
            for n, read in enumerate(reads):
                out = out | (read(r).astype(UNSIGNED[whole]) << UNSIGNED[whole](n * each))
            return (out,)

        return Pure((target.slot,), join)
    parts = o.targets(to, i)
    each = whole // len(parts)
    read = o.read(of, f"b{whole}")
    wanted = [(n, p.slot) for n, p in enumerate(parts) if p is not None]

    def split(r: list[Any]) -> tuple[Array, ...]:
        x = read(r)
        return tuple((x >> UNSIGNED[whole](n * each)).astype(UNSIGNED[each]) for n, _ in wanted)

    return Pure(tuple(slot for _, slot in wanted), split)


def cvt(o: Operands, i: Instruction) -> Pure:
    to, of = [m for m in i.mods if is_type(m)]
    (target,) = o.targets(i.operands[0], i)
    assert target is not None
    bits, ftz, relu = target.bits, "ftz" in i.mods, "relu" in i.mods
    mods = tuple(m for m in i.mods if not is_type(m))
    if to == "tf32":
        read = o.read(i.operands[1], "b32")
        # rna: to nearest, ties away from zero
        return Pure((target.slot,), lambda r: ((read(r) + np.uint32(0x1000)) & np.uint32(0xFFFFE000),))
    reads = [o.read(x, of) for x in i.operands[1:]]
    half = {"f16x2": "f16", "bf16x2": "bf16"}.get(to)
    change = functions.conversion(mods, half or to, of)

    def values(r: list[Any]) -> tuple[Array]:
        parts = [read(r) for read in reads]
        if ftz:
            parts = [functions.flushed(p) for p in parts]
        done = [change(p) for p in parts]
        if relu:
            done = [np.maximum(d, d.dtype.type(0)) for d in done]
        if half:  # the first operand becomes the upper half
            return (untyped(np.stack(np.broadcast_arrays(done[1], done[0]), -1), to, bits),)
        return (untyped(functions.flushed(done[0]) if ftz else done[0], to, bits),)

    return Pure((target.slot,), values)


def setp(o: Operands, i: Instruction) -> Pure:
    kind = o.kind_of(i)
    compare = functions.comparison(i.mods[0], kind)
    a, b = (o.read(x, kind) for x in i.operands[1:3])
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(i.mods[1])
    other = o.read(i.operands[3], "pred") if join else None
    targets = o.targets(i.operands[0], i)
    ftz = "ftz" in i.mods

    def values(r: list[Any]) -> tuple[Array, ...]:
        x, y = a(r), b(r)
        yes = compare(functions.flushed(x), functions.flushed(y)) if ftz else compare(x, y)
        both = [yes[:, 0], yes[:, 1]] if kind in PACKED else [yes, ~yes]
        if join is not None and other is not None:
            both = [join(p, other(r)) for p in both]
        return tuple(p for p, t in zip(both, targets, strict=False) if t is not None)

    return Pure(slots(targets), values)


def selp(o: Operands, i: Instruction) -> Pure:
    kind = f"b{bits_of(o.kind_of(i))}"
    (target,) = o.targets(i.operands[0], i)
    assert target is not None
    a, b, p = o.read(i.operands[1], kind), o.read(i.operands[2], kind), o.read(i.operands[3], "pred")
    return Pure((target.slot,), lambda r: (np.where(p(r), a(r), b(r)),))


def policy(o: Operands, i: Instruction) -> Pure:
    (target,) = o.targets(i.operands[0], i)
    assert target is not None
    return Pure((target.slot,), lambda r: (np.zeros(1, np.uint64),))


ARITHMETIC = {"mov": mov, "cvt": cvt, "setp": setp, "selp": selp, "createpolicy": policy}

"""Instructions that read or write memory, and those that order it."""

from __future__ import annotations

import numpy as np

from proof.ptx.instructions.operands import Effect, Operands, slots
from proof.ptx.machine import Block
from proof.ptx.program import Immediate, Instruction, Register, Unsupported, Vector
from proof.ptx.types import UNSIGNED, Array, bits_of, typed, untyped


def ld(o: Operands, i: Instruction) -> Effect:
    kind = o.kind_of(i)
    targets = o.targets(i.operands[0], i)
    if "param" in i.mods:
        return load_param(o, i, kind, targets)
    if "shared" not in i.mods and "global" not in i.mods:
        raise Unsupported("not known here")
    place, width, count = o.address(i.operands[1], i), bits_of(kind), len(targets)
    shared = "shared" in i.mods

    def act(block: Block, mask: Array) -> tuple[Array, ...]:
        address = block.spread(place(block.registers))[mask]
        if shared:
            found = block.shared.load(address, width, count, block.lanes[mask])
        else:
            found = block.memory.load(address, width, count)
        whole = np.zeros((count, block.threads), UNSIGNED[width])
        whole[:, mask] = found.T
        return tuple(untyped(typed(whole[n], kind), kind, t.bits) for n, t in enumerate(targets) if t is not None)

    return Effect(slots(targets), act)


def load_param(o: Operands, i: Instruction, kind: str, targets: list[Register | None]) -> Effect:
    place, width = o.address(i.operands[1], i), bits_of(kind)
    bytes_ = np.arange(width // 8 * len(targets))

    def act(block: Block, mask: Array) -> tuple[Array, ...]:
        at = place(block.registers).astype(np.int64)
        if len(at) > 1:
            at = np.where(mask, at, 0)
        raw = np.ascontiguousarray(block.params[at[:, None] + bytes_]).view(UNSIGNED[width])
        return tuple(
            untyped(typed(np.ascontiguousarray(raw[:, n]), kind), kind, t.bits)
            for n, t in enumerate(targets)
            if t is not None
        )

    return Effect(slots(targets), act)


def st(o: Operands, i: Instruction) -> Effect:
    width = bits_of(o.kind_of(i))
    place, value = o.address(i.operands[0], i), i.operands[1]
    reads = [o.read(p, f"b{width}") for p in (value.parts if isinstance(value, Vector) else (value,))]
    if "shared" not in i.mods and "global" not in i.mods:
        raise Unsupported("not known here")
    shared = "shared" in i.mods

    def act(block: Block, mask: Array) -> None:
        address = block.spread(place(block.registers))[mask]
        values = np.stack([block.spread(read(block.registers))[mask] for read in reads], 1)
        if shared:
            block.shared.store(address, values, block.lanes[mask])
        else:
            block.memory.store(address, values)

    return Effect((), act)


def atom(o: Operands, i: Instruction) -> Effect:
    """One thread after the other, in global memory."""
    kind = o.kind_of(i)
    returns = i.name == "atom"
    target = o.targets(i.operands[0], i)[0] if returns else None
    place, *given = i.operands[1:] if returns else i.operands
    address, reads = o.address(place, i), [o.read(x, kind) for x in given]
    known = ("add", "min", "max", "and", "or", "xor", "exch", "cas")
    name = next((m for m in i.mods if m in known), "")
    if "global" not in i.mods or not name or (len(given) != 1 and name != "cas"):
        raise Unsupported("not known here")
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
               "xor": np.bitwise_xor}.get(name)  # fmt: skip

    def act(block: Block, mask: Array) -> tuple[Array, ...]:
        places = block.spread(address(block.registers))
        values = [block.spread(read(block.registers)) for read in reads]
        before = np.zeros(block.threads, UNSIGNED[bits_of(kind)])
        for lane in np.flatnonzero(mask):
            at = places[lane : lane + 1]
            old = typed(block.memory.load(at, bits_of(kind), 1)[0], kind)
            mine = [v[lane : lane + 1] for v in values]
            if name == "cas":
                new = mine[1] if old[0] == mine[0][0] else old
            else:
                new = combine(old, mine[0]) if combine is not None else mine[0]
            block.memory.store(at, untyped(new, kind, bits_of(kind))[:, None])
            before[lane] = untyped(old, kind, bits_of(kind))[0]
        return (before,) if target is not None else ()

    return Effect(((target.slot,) if target is not None else ()), act)


def cp(o: Operands, i: Instruction) -> Effect:
    if i.mods[0] != "async" or "bulk" in i.mods:
        raise Unsupported("not known here")
    if "commit_group" in i.mods:
        return Effect((), lambda block, mask: block.commit_copies(mask))
    if "wait_group" in i.mods:
        (count,) = i.operands
        assert isinstance(count, Immediate)
        return Effect((), lambda block, mask: block.wait_for_copies(mask, count.bits))
    if "wait_all" in i.mods:
        return Effect((), lambda block, mask: block.wait_for_copies(mask, -1))
    to, of, size, *source = i.operands
    assert isinstance(size, Immediate)
    nbytes = size.bits
    to_address, of_address = o.address(to, i), o.address(of, i)
    read_size = o.read(source[0], "u32") if source else None

    def act(block: Block, mask: Array) -> None:
        r = block.registers
        there = block.spread(to_address(r))[mask]
        data = np.zeros((len(there), nbytes), np.uint8)
        counts = block.spread(read_size(r))[mask] if read_size else np.full(len(there), nbytes)
        if not np.isin(counts, (0, nbytes)).all():
            raise Unsupported("not known here")
        read = counts == nbytes
        words = block.memory.load(block.spread(of_address(r))[mask][read], 32, nbytes // 4)
        data[read] = words.view(np.uint8)
        block.begin_copy(there, data, mask)

    return Effect((), act)


def nothing(o: Operands, i: Instruction) -> Effect:
    """Orders or hints that this machine has no use for."""
    return Effect((), lambda block, mask: None)


ACCESSES = {"ld": ld, "st": st, "atom": atom, "red": atom, "cp": cp}
ACCESSES |= dict.fromkeys(("membar", "fence", "prefetch"), nothing)

"""Instructions that a whole warp takes part in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proof.ptx.instructions import warp
from proof.ptx.instructions.operands import Effect, Operands, slots
from proof.ptx.machine import Block
from proof.ptx.program import Instruction, Register, Unsupported, Vector
from proof.ptx.types import Array, untyped


def together(i: Instruction, targets: list[Register | None], work: Callable[[Block, Array], list[Array]]) -> Effect:
    """`work` gives (warps, 32) arrays, one per target, from a block and which of its warps act: whole ones, or none."""

    def act(block: Block, mask: Array) -> tuple[Array, ...]:
        found = work(block, block.whole_warps(mask, i))
        return tuple(np.ascontiguousarray(x).reshape(-1) for x, t in zip(found, targets, strict=True) if t is not None)

    return Effect(slots(targets), act)


def shfl(o: Operands, i: Instruction) -> Effect:
    targets = o.targets(i.operands[0], i)
    x, by, control = (o.read(x, "b32") for x in i.operands[1:4])

    def work(block: Block, acting: Array) -> list[Array]:
        r = block.registers
        found = warp.shuffle(i.mods[1], *(block.warps(read(r)) for read in (x, by, control)))
        return list(found[: len(targets)])

    return together(i, targets, work)


def mma(o: Operands, i: Instruction) -> Effect:
    shape, kinds = i.mods[2], i.mods[5:]
    if i.mods[:2] != ("sync", "aligned") or i.mods[3:5] != ("row", "col") or kinds[0] != "f32":
        raise Unsupported("not known here")
    if kinds[1] != kinds[2]:
        raise Unsupported("not known here")
    read = []
    for operand in i.operands[1:]:
        assert isinstance(operand, Vector)
        read.append([o.read(p, "b32") for p in operand.parts])

    def work(block: Block, acting: Array) -> list[Array]:
        a, b, c = ([block.warps(one(block.registers)) for one in part] for part in read)
        return warp.product(shape, kinds[1], a, b, c)

    return together(i, o.targets(i.operands[0], i), work)


def ldmatrix(o: Operands, i: Instruction) -> Effect:
    targets = o.targets(i.operands[0], i)
    count, flip = len(targets), "trans" in i.mods
    place = o.address(i.operands[1], i)
    if "m8n8" not in i.mods or "b16" not in i.mods:
        raise Unsupported("not known here")

    def work(block: Block, acting: Array) -> list[Array]:
        address = block.warps(place(block.registers))[acting, : 8 * count]
        thread = block.lanes.reshape(-1, 32)[acting, : 8 * count]
        rows = np.zeros((len(acting), count, 8, 8), np.uint16)
        rows[acting] = block.shared.load(address.reshape(-1), 16, 8, thread.reshape(-1)).reshape(-1, count, 8, 8)
        return [warp.transposed(rows[:, n], flip) for n in range(count)]

    return together(i, targets, work)


def stmatrix(o: Operands, i: Instruction) -> Effect:
    value = i.operands[1]
    if not isinstance(value, Vector) or "m8n8" not in i.mods or "b16" not in i.mods:
        raise Unsupported("not known here")
    reads, flip = [o.read(p, "b32") for p in value.parts], "trans" in i.mods
    place, count = o.address(i.operands[0], i), len(value.parts)

    def work(block: Block, acting: Array) -> list[Array]:
        address = block.warps(place(block.registers))[acting, : 8 * count]
        thread = block.lanes.reshape(-1, 32)[acting, : 8 * count]
        rows = [
            np.ascontiguousarray(block.warps(read(block.registers))[acting]).view(np.uint16).reshape(-1, 8, 8)
            for read in reads
        ]
        values = np.stack([r.transpose(0, 2, 1) if flip else r for r in rows], 1).reshape(-1, 8)
        block.shared.store(address.reshape(-1), values, thread.reshape(-1))
        return []

    return together(i, [], work)


def movmatrix(o: Operands, i: Instruction) -> Effect:
    read = o.read(i.operands[1], "b32")
    if i.mods[2:] != ("m8n8", "trans", "b16"):
        raise Unsupported("not known here")

    def work(block: Block, acting: Array) -> list[Array]:
        rows = np.ascontiguousarray(block.warps(read(block.registers))).view(np.uint16).reshape(-1, 8, 8)
        return [warp.transposed(rows, True)]

    return together(i, o.targets(i.operands[0], i), work)


def redux(o: Operands, i: Instruction) -> Effect:
    kind = o.kind_of(i)
    read = o.read(i.operands[1], kind)
    return together(
        i,
        o.targets(i.operands[0], i),
        lambda block, _: [untyped(warp.reduced(i.mods[1], block.warps(read(block.registers))), kind, 32)],
    )


def vote(o: Operands, i: Instruction) -> Effect:
    read = o.read(i.operands[1], "pred")
    return together(
        i, o.targets(i.operands[0], i), lambda block, _: [warp.vote(i.mods[1], block.warps(read(block.registers)))]
    )


COLLECTIVE = {"shfl": shfl, "mma": mma, "redux": redux, "vote": vote}
COLLECTIVE |= {"ldmatrix": ldmatrix, "stmatrix": stmatrix, "movmatrix": movmatrix}

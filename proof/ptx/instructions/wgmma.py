"""Matrix products of a warp group (sm_90): 64 rows for four warps, operands in shared memory where a descriptor says.

A descriptor has, in units of 16 bytes, a start address (bits 0 to 13), a leading offset L (16 to 29) and a stride S
(32 to 45), and a swizzle (62, 63). Rows of w bytes, w = 128, 64 or 32 by the swizzle, stand in groups of eight:

    k contiguous:    element (r, k) at  r / 8 S + r % 8 w + 2 k                       w = 16: k / 8 L, and 2 (k % 8)
    r contiguous:    element (r, k) at  r / (w / 2) L + r % (w / 2) 2 + k % 8 w + k / 8 S

and bits 4 to 6 of an address are then xored with as many bits from bit 7 on as the swizzle is wide.
"""

from __future__ import annotations

import numpy as np

from proof.ptx.instructions.collective import together
from proof.ptx.instructions.operands import Effect, Operands
from proof.ptx.instructions.warp import operands
from proof.ptx.machine import Block
from proof.ptx.program import Immediate, Instruction, Unsupported, Vector
from proof.ptx.types import Array, float_of_bf16

WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}


def places(descriptor: int, rows: int, k_contiguous: bool) -> Array:
    """Addresses (rows, 16) of the operand's elements."""
    start, lead, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    width = WIDTHS[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise Unsupported("a wgmma descriptor with a base offset")
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if k_contiguous:
        at = r // 8 * stride + r % 8 * width + (2 * k if width > 16 else k // 8 * lead + k % 8 * 2)
    elif width > 16:
        row = width // 2
        at = r // row * lead + r % row * 2 + k % 8 * width + k // 8 * stride
    else:
        at = r // 8 * stride + r % 8 * 2 + k % 8 * 16 + k // 8 * lead
    at = start + at
    return at ^ ((at >> 7 & (width // 16 - 1)) << 4)


def from_shared(block: Block, descriptor: int, rows: int, k_contiguous: bool, kind: str, thread: int) -> Array:
    at = places(descriptor, rows, k_contiguous)
    bits = block.shared.load(at.reshape(-1).astype(np.uint64), 16, 1, np.full(at.size, thread)).reshape(at.shape)
    return (bits.view(np.float16) if kind == "f16" else float_of_bf16(bits)).astype(np.float64)


def wgmma(o: Operands, i: Instruction) -> Effect:
    if i.mods[0] != "mma_async":  # fences and groups: a product is done at once here
        return Effect((), lambda block, mask: None)
    shape, kinds = i.mods[3], i.mods[4:]
    n = int(shape[4:-3]) if shape.startswith("m64n") and shape.endswith("k16") else 0
    targets = o.targets(i.operands[0], i)
    if not n or kinds[0] != "f32" or kinds[1] not in ("f16", "bf16") or kinds[1] != kinds[2] or len(targets) != n // 2:
        raise Unsupported("not known here")
    left, right, keep, *flags = i.operands[1:]
    signs, flips = flags[:2], flags[2:]
    if signs != [Immediate(1)] * 2:
        raise Unsupported("not known here")
    kind = kinds[1]
    registers = [o.read(p, "b32") for p in left.parts] if isinstance(left, Vector) else None
    left_at = None if registers else o.read(left, "u64")
    right_at, kept = o.read(right, "u64"), o.read(keep, "pred")
    # transposed: the rows of an operand are contiguous
    flipped = [f == Immediate(1) for f in flips]
    sums = [o.read(t, "b32") for t in i.operands[0].parts]  # type: ignore[union-attr]

    def work(block: Block, acting: Array) -> list[Array]:
        r = block.registers
        if keep == Immediate(0):  # the sums are not even written yet
            start = np.zeros((len(acting), n // 2, 32), np.uint32)
        else:
            start = np.stack([block.warps(read(r)) for read in sums], 1)
        out = start.copy()
        for warp in np.flatnonzero(acting)[::4]:
            group, thread = slice(warp, warp + 4), int(warp) * 32
            if warp % 4 or not acting[group].all():
                raise Unsupported("a part of a warp group")
            at = int(block.spread(right_at(r))[thread])
            b = from_shared(block, at, n, not flipped[-1], kind, thread)
            if registers:
                a = operands("m16n8k16", kind, [block.warps(read(r))[group] for read in registers], [])[0].reshape(
                    64, 16
                )
            else:
                assert left_at is not None
                a = from_shared(block, int(block.spread(left_at(r))[thread]), 64, not flipped[0], kind, thread)
            # (warp, row half, g, column block, t, pair) of the sum; a lane's registers are (column block, half, pair)
            added = (a @ b.T).reshape(4, 2, 8, n // 8, 4, 2).transpose(0, 3, 1, 5, 2, 4).reshape(4, n // 2, 32)
            before = np.ascontiguousarray(start[group]).view(np.float32)
            whole = np.where(block.warps(kept(r))[group][:, :1, None], before, np.float32(0)) + added
            out[group] = whole.astype(np.float32).view(np.uint32)
        return [out[:, j] for j in range(n // 2)]

    return together(i, targets, work)

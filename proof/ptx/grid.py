"""A launch: all blocks of a grid, one after the other."""

from __future__ import annotations

import numpy as np

from proof.ptx.instructions.operands import SPECIALS
from proof.ptx.machine import Block, Step
from proof.ptx.memory import Tensors
from proof.ptx.program import Program
from proof.ptx.types import Array

ORDER = np.random.default_rng(0)


def launch(
    program: Program, steps: list[Step], grid: tuple[int, int, int], threads: int, shared: int, params: Array,
    memory: Tensors,
) -> None:  # fmt: skip
    """All blocks, in a random order. Raises Fault."""
    x, y, z = grid
    lanes = np.arange(threads, dtype=np.uint32)
    lane = lanes & np.uint32(31)
    one = np.uint32(1)
    fixed = dict(zip(("%ntid.x", "%ntid.y", "%ntid.z"), (threads, 1, 1), strict=True))
    fixed |= dict(zip(("%nctaid.x", "%nctaid.y", "%nctaid.z"), grid, strict=True))
    fixed |= {"%tid.y": 0, "%tid.z": 0, "%nwarpid": threads // 32}
    below = ((one << lane) - one).astype(np.uint32)
    by_lane = {"%tid.x": lanes, "%laneid": lane, "%warpid": lanes >> np.uint32(5)}
    by_lane |= {"%lanemask_eq": one << lane, "%lanemask_lt": below, "%lanemask_le": below | (one << lane)}
    by_lane |= {"%lanemask_gt": ~(below | (one << lane)), "%lanemask_ge": ~below}
    first = len(program.bits)
    with np.errstate(all="ignore"):
        for number in ORDER.permutation(x * y * z):
            place = {"%ctaid.x": number % x, "%ctaid.y": number // x % y, "%ctaid.z": number // (x * y)}
            values = by_lane | {name: np.array([v], np.uint32) for name, v in (fixed | place).items()}
            special = {first + i: values[name] for i, name in enumerate(SPECIALS)}
            Block(program, steps, threads, memory, params, program.static_shared + shared, special).run()

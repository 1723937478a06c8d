"""The CUDA kernels' rows of the compile table (`python -m proof compile`).

What counts as the inner loop of decode is the shortest cycle through all of its matrix products and slab copies: the
path of a slab that is seen whole, has the outlier channels of the slab before and brings no new maximum.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARKS = re.compile(r"\b(HMMA|LDGSTS)\b")
MATRIX = re.compile(r"\bHMMA\b")


@dataclass(frozen=True)
class CudaVariant:
    """One kernel of csrc/cuda/cubin.cu."""

    name: str
    part: int
    head_size: int
    warps: int
    shared: int
    decode: bool = False


def variants() -> Iterator[CudaVariant]:
    for d in (64, 128, 256):
        warps, slab = (2 if d == 256 else 4), slab_bytes(d)
        for tiles in (1, 2):
            shared = warps * (2 * (64 + slab) + tiles * 48 * d)
            yield CudaVariant(f"decode qjl3 d={d} rows={8 * tiles}", tiles, d, warps, shared, True)
        for tiles in (1, 2):
            yield CudaVariant(f"query qjl3 d={d} rows={8 * tiles}", 2 + tiles, d, 4, 32 * tiles * (d + 1) + d // 4)
        yield CudaVariant(f"pack qjl3 d={d}", 5, d, 8, pack_bytes(d))


def slab_bytes(d: int) -> int:
    from vllm_kvq.formats import Geometry, get_format

    return get_format("qjl3").bind(Geometry(d, 64)).slab_region.nbytes


def pack_bytes(d: int) -> int:
    """`Pack<D>::SHARED` of csrc/cuda/pack.h."""
    return 144 * (d + d // 16) + 4 * 3 * d + 4 * d + 9 * 128 + 4 * (d // 16) + 4 * d + 8 * d + 256


def parse(sass: str) -> tuple[list[str], list[list[int]]]:
    """Instructions, and for each the instructions that can follow it."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
    after: list[list[int]] = []
    for i, instruction in enumerate(code):
        guarded = instruction.startswith("@")
        branch = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        if branch:
            # a condition may also stand after the name
            guarded = guarded or re.search(r"\bBRA(\.\w+)*\s+!?U?P\d", instruction) is not None
            targets = [labels[branch[1]]] + ([i + 1] if guarded else [])
        elif re.search(r"\b(EXIT|RET)\b", instruction):
            targets = [i + 1] if guarded else []
        else:
            targets = [i + 1]
        after.append([t for t in targets if t < len(code)])
    return code, after


def shortest(after: list[list[int]], first: int, last: int) -> list[int] | None:
    """The instructions from behind `first` up to `last`, on the shortest way."""
    came: dict[int, int] = {}
    waiting = deque([first])
    while waiting:
        at = waiting.popleft()
        for then in after[at]:
            if then in came:
                continue
            came[then] = at
            if then == last:
                way = [last]
                while came[way[-1]] != first:
                    way.append(came[way[-1]])
                return way[::-1]
            waiting.append(then)
    return None


def hot_loop(sass: str) -> list[str]:
    """The instructions of one turn, see the module; empty where there is no such loop."""
    code, after = parse(sass)
    # products in small loops of their own are set-up
    loops = [(i, shortest(after, i, i)) for i, c in enumerate(code) if MARKS.search(c)]
    marks = [i for i, way in loops if way is not None and len(way) > 100]
    turn: list[str] = []
    for first, last in zip(marks, marks[1:] + marks[:1], strict=True):
        way = shortest(after, first, last)
        if way is None:
            raise RuntimeError("the matrix products of the loop do not lie on one cycle")
        turn += [code[i] for i in way]
    return turn


def build(variant: CudaVariant, target: int, directory: Path) -> Path:
    from vllm_kvq.kernels.gpu import build as build_cuda

    return build_cuda.one_kernel(target, variant.head_size, variant.part, directory)

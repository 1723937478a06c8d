"""A binary's machine code (SASS), and the inner loop in it. The tools that read it are shipped with Triton."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

MARKS = re.compile(r"\b(HMMA|LDGSTS)\b")


def tool(name: str) -> str:
    import triton.backends.nvidia

    return str(Path(triton.backends.nvidia.__file__).parent / "bin" / name)


def read_cubin(path: str) -> tuple[int, int, str]:
    """(registers, stack, SASS) of a binary with one kernel."""
    read: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    resources = subprocess.run([tool("cuobjdump"), "-res-usage", path], **read).stdout
    sass = subprocess.run([tool("nvdisasm"), "-c", path], **read).stdout
    registers, stack = (int(re.search(rf"{n}:(\d+)", resources)[1]) for n in ("REG", "STACK"))  # type: ignore[index]
    return registers, stack, sass


def instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """In order, and where each label stands among them."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
    return code, labels


def longest_loop(sass: str) -> list[str]:
    """The instructions of the longest backward branch."""
    code, labels = instructions(sass)
    best: list[str] = []
    for i, instruction in enumerate(code):
        found = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        first = labels.get(found[1], i + 1) if found else i + 1
        if first <= i and i + 1 - first > len(best):
            best = code[first : i + 1]
    return best


def followers(code: list[str], labels: dict[str, int]) -> list[list[int]]:
    """For each instruction those that can follow it."""
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
    return after


def shortest(after: list[list[int]], first: int, last: int) -> list[int] | None:
    """The instructions after `first` up to `last`, by the shortest path."""
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


def shortest_cycle(sass: str) -> list[str]:
    """The shortest cycle through all matrix products and slab copies of the kernel; empty where there is none.

    It is the inner loop of a decode step, on the path of a slab that is seen whole, has the outlier channels of the
    slab before and brings no new maximum.
    """
    code, labels = instructions(sass)
    after = followers(code, labels)
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

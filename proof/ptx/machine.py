"""One block of threads: instructions, branches, barriers.

All threads of a block step together. Where a branch separates them, the threads at the smallest address go on, so that
all meet again where the paths join.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proof.ptx.memory import Fault, Shared, Tensors
from proof.ptx.program import Instruction, Program
from proof.ptx.types import UNSIGNED, Array

POISON = (1 << 64) - 1
"""The contents of a register before it is written: NaN as a float of any width."""


def _poison(bits: int) -> Array:
    return np.zeros(1, bool) if bits == 1 else np.array([POISON & ((1 << bits) - 1)], UNSIGNED[bits])


@dataclass
class Copy:
    """A cp.async under way."""

    threads: Array
    group: Array
    """The group that each thread belongs to."""
    address: Array
    data: Array


@dataclass(frozen=True)
class Step:
    """An instruction ready to run.

    `values` gives what goes into `targets`, computed only from registers; `act` does anything else, in the threads of a
    mask; `jump` is a branch's target.
    """

    source: Instruction
    targets: tuple[int, ...] = ()
    values: Callable[[list[Any]], tuple[Array, ...]] | None = None
    act: Callable[[Block, Array], tuple[Array, ...] | None] | None = None
    guard: int = -1
    unless: bool = False
    jump: int = -1
    kind: str = ""
    """"branch", "exit", "barrier", or none of these."""


@dataclass
class Block:
    program: Program
    steps: list[Step]
    threads: int
    memory: Tensors
    params: Array
    """The parameters' bytes."""
    shared_bytes: int
    special: Mapping[int, Array]
    """Slots of special registers."""
    registers: list[Any] = field(init=False)
    shared: Shared = field(init=False)

    def __post_init__(self) -> None:
        # a branch may jump over the instruction that writes a register: its contents are then unspecified
        self.registers = [_poison(bits) for bits in self.program.bits]
        self.registers += [self.special[slot] for slot in sorted(self.special)]
        self.shared = Shared(self.shared_bytes, self.threads)
        self.copies: list[Copy] = []
        self.group = np.zeros(self.threads, np.int64)
        self.lanes = np.arange(self.threads)

    def spread(self, x: Array) -> Array:
        """One number per thread."""
        return x if len(x) == self.threads else np.ascontiguousarray(np.broadcast_to(x, (self.threads,)))

    def warps(self, x: Array) -> Array:
        return self.spread(x).reshape(-1, 32)

    def run(self) -> None:
        """Until all threads have exited. Raises Fault."""
        code, registers = self.steps, self.registers
        everyone = np.ones(self.threads, bool)
        active, whole, at = everyone, True, 0
        waiting: dict[int, Array] = {}
        while True:
            if waiting:
                first = min(waiting)
                if at >= first or not active.any():
                    mine = waiting.pop(first)
                    if active.any() and at == first:
                        mine = mine | active
                    elif active.any():
                        waiting[at] = waiting[at] | active if at in waiting else active
                    active, at = mine, first
                    whole = bool(active.all())
            elif not active.any():
                return
            step = code[at]
            if step.values is not None and whole and step.guard < 0:
                for target, value in zip(step.targets, step.values(registers), strict=True):
                    registers[target] = value
                at += 1
                continue
            mask = active
            if step.guard >= 0:
                guard = registers[step.guard]
                mask = active & (~guard if step.unless else guard)
            if step.kind == "branch":
                target = step.jump
                if mask.all() or not (active & ~mask).any():
                    at = target
                elif not mask.any():
                    at += 1
                else:
                    waiting[target] = waiting[target] | mask if target in waiting else mask
                    active, whole = active & ~mask, False
                    at += 1
                continue
            if step.kind == "exit":
                if mask.any():
                    active, whole = active & ~mask, False
                at += 1
                continue
            if step.kind == "barrier":
                self._barrier(step, mask)
                at += 1
                continue
            try:
                results = step.values(registers) if step.values is not None else step.act(self, mask)  # type: ignore[misc]
            except Fault as fault:
                raise Fault(f"{fault} [{step.source.text}]") from None
            for target, value in zip(step.targets, results or (), strict=True):
                self._write(target, value, mask)
            at += 1

    def _write(self, target: int, value: Array, mask: Array) -> None:
        self.registers[target] = value if mask.all() else np.where(mask, value, self.registers[target])

    def _barrier(self, step: Step, mask: Array) -> None:
        mods = step.source.mods
        if "warp" in mods:
            self.shared.warp_barrier(self.whole_warps(mask, step.source))
            return
        # a GPU does not wait for threads that have exited; here all must arrive
        if not mask.all():
            raise Fault(f"only {int(mask.sum())} of {self.threads} threads reach a barrier [{step.source.text}]")
        self.shared.barrier()

    def whole_warps(self, mask: Array, source: Instruction) -> Array:
        """Which warps act. Raises Fault where only a part of one does."""
        by_warp = mask.reshape(-1, 32)
        if (by_warp.any(1) != by_warp.all(1)).any():
            raise Fault(f"only a part of a warp executes what all of it must [{source.text}]")
        return np.asarray(by_warp.any(1))

    # asynchronous copies

    def begin_copy(self, address: Array, data: Array, mask: Array) -> None:
        """Bytes (threads of the mask, n) that arrive when their group is waited for. Until then the place holds NaN."""
        threads = self.lanes[mask]
        self.shared.store(address, np.full_like(data, 0xFF), threads)
        self.copies.append(Copy(threads, self.group[threads], address, data))

    def commit_copies(self, mask: Array) -> None:
        self.group = self.group + mask

    def wait_for_copies(self, mask: Array, but: int) -> None:
        left: list[Copy] = []
        for copy in self.copies:
            done = mask[copy.threads] & (copy.group < self.group[copy.threads] - but)
            if done.any():
                self.shared.store(copy.address[done], copy.data[done], copy.threads[done])
            if not done.all():
                rest = ~done
                left.append(Copy(copy.threads[rest], copy.group[rest], copy.address[rest], copy.data[rest]))
        self.copies = left

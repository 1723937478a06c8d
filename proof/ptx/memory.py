"""Memory as a kernel sees it: the tensors of a launch, and a block's shared memory. Every access is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from proof.ptx.types import UNSIGNED, Array


class Fault(RuntimeError):
    """An access out of bounds, misaligned or racing, or a barrier that some threads miss; a GPU may not notice it."""


@dataclass
class Traffic:
    """Counts of loads from global memory."""

    loads: int = 0
    """Instructions, of all lanes of a warp together."""
    asked: int = 0
    """Bytes, by all lanes."""
    sectors: int = 0
    """Sectors of 32 bytes, counted again for each instruction: what caches must deliver."""
    touched: set[int] = field(default_factory=set)
    """Sectors that were requested at least once: what memory must deliver."""

    def note(self, address: Array, nbytes: int) -> None:
        first, last = address // np.uint64(32), (address + np.uint64(nbytes - 1)) // np.uint64(32)
        found = np.unique(np.concatenate([first, last]))  # no load is wider than a sector
        self.loads += 1
        self.asked += nbytes * len(address)
        self.sectors += len(found)
        self.touched.update(found.tolist())


class Tensors:
    """Global memory: nothing but the given ranges of addresses exists."""

    traffic: ClassVar[Traffic | None] = None
    """The counter of loads, if they are counted."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ranges as (first address, bytes); they may overlap."""
        joined: list[list[int]] = []
        for start, nbytes in sorted(ranges):
            if nbytes and joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], start + nbytes)
            elif nbytes:
                joined.append([start, start + nbytes])
        self.starts, self.ends = np.array(joined, np.uint64).reshape(-1, 2).T
        # arrays begin at an aligned address, so that an aligned access is an index
        self.origins = self.starts & np.uint64(2**64 - 64)
        self.parts = [
            np.ctypeslib.as_array((ctypes.c_uint8 * int(end - origin)).from_address(int(origin)))
            for origin, end in zip(self.origins, self.ends, strict=True)
        ]

    def _places(self, address: Array, nbytes: int) -> tuple[Array, Array]:
        part = np.searchsorted(self.starts, address, side="right") - 1
        bad = part < 0
        if len(self.starts) and not bad.all():
            bad |= address + np.uint64(nbytes) > self.ends[part]
        if bad.any():
            wrong = int(address[bad][0])
            near = [f"{int(s):#x}..{int(e):#x}" for s, e in zip(self.starts, self.ends, strict=True)]
            raise Fault(f"{int(bad.sum())} of {len(address)} accesses of {nbytes} bytes lie outside all tensors, "
                        f"the first at {wrong:#x}; there are {', '.join(near)}")  # fmt: skip
        if (address % np.uint64(nbytes)).any():
            wrong = int(address[address % np.uint64(nbytes) != 0][0])
            raise Fault(f"an access of {nbytes} bytes at {wrong:#x} is misaligned")
        return part, address - self.origins[part]

    def load(self, address: Array, width: int, count: int) -> Array:
        """(threads, count) numbers of `width` bits."""
        nbytes = width // 8
        part, offset = self._places(address, nbytes * count)
        if self.traffic is not None:
            self.traffic.note(address, nbytes * count)
        out = np.empty((len(address), count), UNSIGNED[width])
        first = int(part[0]) if len(part) else 0
        if (part == first).all():
            out[:] = self._words(first, width)[self._index(offset, nbytes, count)] if len(part) else 0
            return out
        for p in np.unique(part):
            mine = part == p
            out[mine] = self._words(int(p), width)[self._index(offset[mine], nbytes, count)]
        return out

    def store(self, address: Array, values: Array) -> None:
        nbytes, count = values.dtype.itemsize, values.shape[1]
        part, offset = self._places(address, nbytes * count)
        for p in np.unique(part):
            mine = part == p
            self._words(int(p), nbytes * 8)[self._index(offset[mine], nbytes, count)] = values[mine]

    def _words(self, part: int, width: int) -> Array:
        data = self.parts[part]
        nbytes = width // 8
        return data[: len(data) // nbytes * nbytes].view(UNSIGNED[width])

    @staticmethod
    def _index(offset: Array, nbytes: int, count: int) -> Array:
        return (offset // np.uint64(nbytes)).astype(np.int64)[:, None] + np.arange(count)


NONE, SEVERAL = -1, -2
"""In the place of a thread's or a warp's number."""
READS, WRITES = 0, 1


class Shared:
    """A block's shared memory, and which thread touched which byte since the last barrier.

    Two threads race for a byte if one of them writes it and no barrier separates them: `bar.sync` for any two,
    `bar.warp.sync` for those of one warp. Writing the same value as another thread is not a race.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        # NaN as a float: reading before writing shows in the result
        self.data = np.full(nbytes, 0xFF, np.uint8)
        self.epoch = 0
        self.warp_epoch = np.zeros(threads // 32, np.int64)
        # of reads and of writes: which thread's, which warp's, and after how many barriers
        self.thread = [np.full(nbytes, NONE, np.int32) for _ in range(2)]
        self.warp = [np.full(nbytes, NONE, np.int32) for _ in range(2)]
        self.when = [np.full(nbytes, -1, np.int64) for _ in range(2)]
        self.warp_when = [np.full(nbytes, -1, np.int64) for _ in range(2)]

    def barrier(self) -> None:
        self.epoch += 1

    def warp_barrier(self, warps: Array) -> None:
        self.warp_epoch[warps] += 1

    def _places(self, address: Array, nbytes: int) -> Array:
        if len(address) and (int(address.max()) + nbytes > len(self.data)):
            raise Fault(f"shared memory has {len(self.data)} bytes, and {int(address.max()) + nbytes} are touched")
        if (address % np.uint64(nbytes)).any():
            raise Fault(f"an access of {nbytes} bytes to shared memory is misaligned")
        return address.astype(np.int64)[:, None] + np.arange(nbytes)

    def _others(self, kind: int, places: Array, thread: Array) -> Array:
        """The places that another thread has read, or written, unordered with this one."""
        warp = thread[:, None] >> 5
        unordered = (self.when[kind][places] == self.epoch) & (self.thread[kind][places] != thread[:, None])
        ordered_in_warp = self.warp_when[kind][places] < self.warp_epoch[warp]
        return unordered & ~((self.warp[kind][places] == warp) & ordered_in_warp)

    def _note(self, kind: int, places: Array, thread: Array) -> None:
        fresh = self.when[kind][places] == self.epoch
        for known, mine in ((self.thread[kind], thread), (self.warp[kind], thread >> 5)):
            who = np.broadcast_to(mine[:, None], places.shape)
            before = known[places]
            several = fresh & (before != who) if kind == READS else np.zeros(places.shape, bool)
            known[places] = who
            known[places[several | (known[places] != who)]] = SEVERAL
        self.when[kind][places] = self.epoch
        self.warp_when[kind][places] = self.warp_epoch[thread >> 5][:, None]

    def load(self, address: Array, width: int, count: int, thread: Array) -> Array:
        places = self._places(address, width // 8 * count)
        if self._others(WRITES, places, thread).any():
            raise Fault("a race: shared memory is read that another thread has written without a barrier between")
        self._note(READS, places, thread)
        return self.data[places].view(UNSIGNED[width])

    def store(self, address: Array, values: Array, thread: Array) -> None:
        nbytes = values.dtype.itemsize * values.shape[1]
        places = self._places(address, nbytes)
        new = np.ascontiguousarray(values).view(np.uint8).reshape(len(address), nbytes)
        if (self._others(WRITES, places, thread) & (self.data[places] != new)).any():
            raise Fault("a race: two threads write the same shared memory without a barrier between")
        if (self._others(READS, places, thread) & (self.data[places] != new)).any():
            raise Fault("a race: shared memory is written that another thread has read without a barrier between")
        self.data[places] = new
        if (self.data[places] != new).any():
            raise Fault("a race: two threads write different values to the same shared memory at once")
        self._note(WRITES, places, thread)

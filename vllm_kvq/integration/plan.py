"""What one step has to move and read, as index tensors: built once per step, used by every layer.

For a request with context c (tokens before this step), q new tokens and L = c + q, first own position `start`:

    boundary   B = max(floor((c - W) / P) * P, start, 0): history below it is read packed, from it on from the ring
    sinks      positions below min(S, B) come from the sink pages
    packing    every unit of P tokens that ends in (c, L], but none that ends at or before start + W when start > 0:
               those lie in pages shared with other requests
    ring       the newest min(q, R) tokens replace the oldest

All arrays are built for all requests at once with ragged ranges; nothing loops over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration.sidecar import MAGIC, SlotGeometry

Index = tuple[torch.Tensor, torch.Tensor]
"""(block, slot in the block)."""


def ragged(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, position) of all positions in [low_i, high_i), i = 0, 1, ..."""
    count = np.maximum(high - low, 0)
    owner = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - np.repeat(first - low, count)


@dataclass(frozen=True)
class Batch:
    """The requests of one step as the scheduler sees them: host arrays, one row per request with new tokens."""

    first_row: np.ndarray
    """Row of each request's first new token in the step's query, key and value."""
    new: np.ndarray
    context: np.ndarray
    pages: np.ndarray
    sidecar: np.ndarray
    sinks: np.ndarray

    @classmethod
    def of(
        cls,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        pages: np.ndarray,
        sidecar: np.ndarray,
        sinks: np.ndarray | None,
    ) -> Batch:
        new = np.diff(query_start)
        # padding rows and vLLM's dummy runs: no tokens, or block 0 as the sidecar
        keep = (new > 0) & (sidecar[: len(new), 0] != 0)
        if not sidecar[: len(new)][keep].all():
            raise RuntimeError("a request has an incomplete sidecar")
        pick = [x[: len(new)][keep] for x in (seq_lens, pages, sidecar)]
        empty = np.zeros((len(pick[0]), 0), np.int64)
        return cls(
            query_start[:-1][keep],
            new[keep],
            pick[0] - new[keep],
            pick[1],
            pick[2],
            empty if sinks is None else sinks[: len(new)][keep],
        )


@dataclass(frozen=True)
class Group:
    """Requests with the same number of new tokens, attended together."""

    requests: torch.Tensor
    rows: torch.Tensor
    """(n, q) rows of the queries."""
    raw: torch.Tensor | None
    """(n, t) rows in [sinks | ring | new tokens]; None: only the new tokens, causally."""
    seen: torch.Tensor | None
    """(n, q, t) booleans."""
    page_ids: torch.Tensor
    owner: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True)
class Units:
    """Pack units that this step completes."""

    page: torch.Tensor
    unit: torch.Tensor
    rows: torch.Tensor
    """(units, P) rows in [ring | new tokens]."""
    state: Index | None
    """(units, state slots) where the owner's state lies."""
    follows: torch.Tensor
    """Units whose page was begun in an earlier step: they keep its page parameters."""

    def split(self, count: int) -> list[Units]:
        """Parts of at most `count` units, to bound the working memory of a long prompt."""
        total = len(self.page)
        if total <= count:
            return [self]
        parts = []
        for at in range(0, total, count):
            s = slice(at, at + count)
            state = None if self.state is None else (self.state[0][s], self.state[1][s])
            parts.append(Units(self.page[s], self.unit[s], self.rows[s], state, self.follows[s]))
        return parts


@dataclass(frozen=True)
class Fit:
    """One request's chunk of a prompt: its rows, and where its state lies."""

    rows: slice
    state: Index
    fresh: bool


@dataclass(frozen=True)
class StepPlan:
    header_block: torch.Tensor
    header: torch.Tensor
    found: torch.Tensor
    """The headers that the plan was made for: a layer that finds others must make its own."""
    ring_read: Index
    ring_write: Index
    ring_rows: torch.Tensor
    sink_read: Index
    sink_write: Index
    sink_rows: torch.Tensor
    units: Units | None
    fits: list[Fit]
    groups: list[Group]


class Planner:
    """Builds plans for one format and one set of companions; every layer of the model shares it."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry, num_spec: int, device: torch.device) -> None:
        self.fmt, self.slots, self.num_spec, self.device = fmt, slots, num_spec, device

    def plan(self, batch: Batch, headers: torch.Tensor) -> StepPlan:
        """`headers` are the layer's (n, 3) sidecar headers of the batch's requests."""
        fmt, slots = self.fmt, self.slots
        c, q = batch.context, batch.new
        magic, start, upcoming = headers.cpu().numpy().astype(np.int64).T
        fresh = magic == 0
        start = np.where(fresh, c, start)
        self._check(batch, fresh, magic, start, upcoming)
        end = c + q
        boundary = np.maximum(np.maximum((c - fmt.W) // fmt.unit * fmt.unit, start), 0)
        sinks = np.minimum(fmt.S, boundary)
        header = np.stack([np.full_like(c, MAGIC), start, end], axis=1).astype(np.int32)

        ring_owner, ring_pos = ragged(boundary, c)
        keep_owner, keep_pos = ragged(np.maximum(c, end - slots.ring), end)
        sink_owner, sink_pos = ragged(np.zeros_like(c), sinks)
        put_owner, put_pos = ragged(c, np.where(start == 0, np.minimum(fmt.S, end), 0))
        prefill = fresh | (q > 1 + self.num_spec)
        return StepPlan(
            self._long(batch.sidecar[:, 0]),
            torch.from_numpy(header).to(self.device),
            headers,
            self._ring(batch, ring_owner, ring_pos),
            self._ring(batch, keep_owner, keep_pos),
            self._long(batch.first_row[keep_owner] + keep_pos - c[keep_owner]),
            self._index(batch.sinks, sink_owner, sink_pos),
            self._index(batch.sinks, put_owner, put_pos),
            self._long(batch.first_row[put_owner] + put_pos - c[put_owner]),
            self._units(batch, start, boundary, len(ring_pos)),
            self._fits(batch, prefill, fresh) if fmt.state_rows else [],
            self._groups(batch, boundary, sinks, len(sink_pos), len(ring_pos)),
        )

    def _check(
        self, batch: Batch, fresh: np.ndarray, magic: np.ndarray, start: np.ndarray, upcoming: np.ndarray
    ) -> None:
        rewound = upcoming - batch.context
        stale = ~fresh & ((magic != MAGIC) | (rewound < 0) | (rewound > self.num_spec))
        if stale.any():
            i = int(stale.argmax())
            raise RuntimeError(
                f"stale sidecar: magic {magic[i]:#x}, next position {upcoming[i]}, "
                f"but {batch.context[i]} tokens are computed"
            )
        if (start % self.fmt.unit).any():
            raise RuntimeError(f"a prefix hit resumes at {start.tolist()}, not at a multiple of {self.fmt.unit} tokens")

    # -- parts -----------------------------------------------------------------------------------------------------
    def _units(self, batch: Batch, start: np.ndarray, boundary: np.ndarray, ring_count: int) -> Units | None:
        fmt, p = self.fmt, self.fmt.unit
        c, end = batch.context, batch.context + batch.new
        shared = np.where(start > 0, (start + fmt.W) // p, 0)
        first, last = np.maximum(c // p, shared), end // p
        owner, unit = ragged(first, last)
        if not len(unit):
            return None
        per_page = fmt.N // p
        page = batch.pages[owner, unit // per_page]
        position = unit[:, None] * p + np.arange(p)
        ring_first = np.cumsum(c - boundary) - (c - boundary)
        at, who = position - boundary[owner, None], owner[:, None]
        rows = np.where(
            position < c[who],
            ring_first[who] + at,
            ring_count + batch.first_row[who] + position - c[who],
        )
        # the page's first unit was packed in an earlier step
        follows = unit // per_page * per_page < first[owner]
        return Units(
            self._long(page),
            self._long(unit % per_page),
            self._long(rows),
            self._state(batch, owner) if fmt.state_rows else None,
            torch.from_numpy(follows).to(self.device),
        )

    def _fits(self, batch: Batch, prefill: np.ndarray, fresh: np.ndarray) -> list[Fit]:
        fits = []
        for i in np.flatnonzero(prefill):
            block, slot = self._state(batch, np.array([i]))
            row = int(batch.first_row[i])
            fits.append(Fit(slice(row, row + int(batch.new[i])), (block[0], slot[0]), bool(fresh[i])))
        return fits

    def _groups(
        self, batch: Batch, boundary: np.ndarray, sinks: np.ndarray, sink_count: int, ring_count: int
    ) -> list[Group]:
        c = batch.context
        ring = c - boundary
        sink_first, ring_first = np.cumsum(sinks) - sinks, np.cumsum(ring) - ring
        page_first = self.fmt.S // self.fmt.N
        groups = []
        for q in np.unique(batch.new):
            mine = np.flatnonzero(batch.new == q)
            step = np.arange(q)
            rows = batch.first_row[mine, None] + step
            owner, page = ragged(
                np.full(len(mine), page_first),
                np.where(boundary[mine] > self.fmt.S, -(-boundary[mine] // self.fmt.N), 0),
            )
            origin = page * self.fmt.N
            raw = seen = None
            if c[mine].any():
                ns, nr = sinks[mine, None], ring[mine, None]
                j = np.arange(int((ns + nr).max()) + q)[None]
                new = j - ns - nr
                raw = np.where(
                    j < ns,
                    sink_first[mine, None] + j,
                    np.where(
                        new < 0,
                        sink_count + ring_first[mine, None] + j - ns,
                        sink_count + ring_count + batch.first_row[mine, None] + np.minimum(new, q - 1),
                    ),
                )
                # history is seen by every query, a new token by itself and the later ones
                seen = new[:, None, :] <= step[None, :, None]
            groups.append(
                Group(
                    self._long(mine),
                    self._long(rows),
                    None if raw is None else self._long(raw),
                    None if seen is None else torch.from_numpy(seen).to(self.device),
                    self._long(batch.pages[mine[owner], page]),
                    self._long(owner),
                    self._long(np.maximum(self.fmt.S - origin, 0)),
                    self._long(np.minimum(boundary[mine[owner]] - origin, self.fmt.N)),
                )
            )
        return groups

    # -- indices ---------------------------------------------------------------------------------------------------
    def _ring(self, batch: Batch, owner: np.ndarray, position: np.ndarray) -> Index:
        return self._index(batch.sidecar, owner, self.slots.ring_at + position % self.slots.ring)

    def _state(self, batch: Batch, owner: np.ndarray) -> Index:
        slot = np.broadcast_to(1 + np.arange(self.slots.state_slots), (len(owner), self.slots.state_slots))
        return self._index(batch.sidecar, owner[:, None], slot)

    def _index(self, table: np.ndarray, owner: np.ndarray, slot: np.ndarray) -> Index:
        block, inner = self.slots.locate(table, owner, slot)
        return self._long(block), self._long(inner)

    def _long(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(self.device)

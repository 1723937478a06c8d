"""What one step must move and read, as index tensors: built once per step, used by every layer.

For a request with context c (tokens before this step), q new tokens and L = c + q, first own position `start`:

    boundary   B = max(floor((c - W) / P) * P, start, 0): history below B is read packed, from B on from the ring
    sinks      positions below min(S, B) come from the sink pages
    packing    every unit of P tokens that ends in (c, L]; those of a prefix hit end at `start`, before c
    ring       the newest min(q, R) tokens replace the oldest

All arrays are built for all requests at once with ragged ranges; nothing loops over tokens. On the GPU
triton_kernels/step.py makes the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.slots import MAGIC, SlotGeometry
from vllm_kvq.kernels.step import StepBatch
from vllm_kvq.kernels.torch.lists import PageList
from vllm_kvq.kernels.torch.pack import Units

Index = tuple[torch.Tensor, torch.Tensor]
"""(block, slot in the block)."""


def ragged(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, position) of all positions in [low_i, high_i), i = 0, 1, ..."""
    count = np.maximum(high - low, 0)
    owner = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - np.repeat(first - low, count)


@dataclass(frozen=True)
class Requests:
    """The requests of a step that have new tokens, one row each, in arrays on the host."""

    first_row: np.ndarray
    """Row of each request's first new token in the step's query, key and value."""
    new: np.ndarray
    context: np.ndarray
    pages: np.ndarray
    sidecar: np.ndarray
    sinks: np.ndarray

    @classmethod
    def of(cls, batch: StepBatch) -> Requests:
        start, sidecar = batch.query_start.numpy(), batch.side_table.cpu().numpy()
        new = np.diff(start)
        # padding rows and vLLM's dummy runs: no tokens, or block 0 as the sidecar
        keep = (new > 0) & (sidecar[: len(new), 0] != 0)
        if not sidecar[: len(new)][keep].all():
            raise RuntimeError("a request has an incomplete sidecar")

        def pick(x: torch.Tensor) -> np.ndarray:
            return x.cpu().numpy()[: len(new)][keep]

        lengths = pick(batch.seq_lens)
        empty = np.zeros((len(lengths), 0), np.int64)
        sinks = empty if batch.sink_table is None else pick(batch.sink_table)
        context = lengths - new[keep]
        return cls(start[:-1][keep], new[keep], context, pick(batch.table), pick(batch.side_table), sinks)


@dataclass(frozen=True)
class Group:
    """Requests with the same number of new tokens, attended together.

    A chunk's new tokens overwrite the ring, so its history is read from a copy of the ring and its new tokens from the
    step's input. The few tokens of a decode step are in the ring themselves by then.
    """

    rows: torch.Tensor
    """(n, q) rows of the queries."""
    run: slice | None
    """The same as one slice of the step's tokens, if they are contiguous."""
    chunk: bool
    start: torch.Tensor
    """(n + 1,) int32: the first query of each request among the group's."""
    held: torch.Tensor | None
    """(n, t) rows of tokens in full precision: of the ring's pool (a chunk: of its copy), then of the sinks' pool;
    negative where there is none. None: nothing precedes the new tokens."""
    seen: torch.Tensor | None
    """(n, q, t) booleans."""
    listed: PageList

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """The group's (n, q, ...) of the step's tokens."""
        return x[self.rows] if self.run is None else x[self.run].unflatten(0, self.rows.shape)


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
    """The headers for which the plan was made: a layer that finds different ones must make its own plan."""
    ring_read: Index
    """The chunks' history in the ring, to be copied before they overwrite it."""
    ring_write: torch.Tensor
    ring_rows: torch.Tensor
    sink_write: torch.Tensor
    sink_rows: torch.Tensor
    units: Units | None
    """Rows of the ring's pool, followed by rows of the new tokens."""
    unit_state: Index | None
    """(owners, state slots): locations of the states that the units use."""
    fits: list[Fit]
    groups: list[Group]


class Planner:
    """Builds plans for one format and one layout of the companions."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry, num_spec: int, device: torch.device) -> None:
        self.fmt, self.slots, self.num_spec, self.device = fmt, slots, num_spec, device
        self.decode_queries = 1 + num_spec
        """A request with more new tokens than this has a chunk of a prompt."""

    def plan(self, requests: Requests, headers: torch.Tensor) -> StepPlan:
        """`headers` are those of all blocks of the layer's sidecar pool."""
        fmt, slots, pool = self.fmt, self.slots, len(headers) * self.slots.slots_per_block
        header_block = self._long(requests.sidecar[:, 0])
        found = headers[header_block]
        c, q = requests.context, requests.new
        magic, start, upcoming = found.cpu().numpy().astype(np.int64).T
        fresh = magic == 0
        start = np.where(fresh, c, start)
        self._check(requests, fresh, magic, start, upcoming)
        end = c + q
        boundary = np.maximum(np.maximum((c - fmt.W) // fmt.unit * fmt.unit, start), 0)
        sinks = np.minimum(fmt.S, boundary)
        header = np.stack([np.full_like(c, MAGIC), start, end], axis=1).astype(np.int32)

        chunk = q > self.decode_queries
        ring_owner, ring_pos = ragged(boundary, np.where(chunk, c, boundary))
        keep_owner, keep_pos = ragged(np.maximum(c, end - slots.ring), end)
        put_owner, put_pos = ragged(c, np.where(start == 0, np.minimum(fmt.S, end), 0))
        prefill = fresh | chunk
        return StepPlan(
            header_block,
            torch.from_numpy(header).to(self.device),
            found,
            self._index(requests.sidecar, ring_owner, slots.ring_at + ring_pos % slots.ring),
            self._long(self._ring_row(requests, keep_owner, keep_pos)),
            self._long(requests.first_row[keep_owner] + keep_pos - c[keep_owner]),
            self._long(self._row(requests.sinks, put_owner, put_pos)),
            self._long(requests.first_row[put_owner] + put_pos - c[put_owner]),
            *self._units(requests, pool, prefill),
            self._fits(requests, prefill, fresh) if fmt.state_rows else [],
            self._groups(requests, boundary, sinks, pool),
        )

    def _check(
        self, requests: Requests, fresh: np.ndarray, magic: np.ndarray, start: np.ndarray, upcoming: np.ndarray
    ) -> None:
        rewound = upcoming - requests.context
        stale = (magic != MAGIC) | (rewound < 0) | (rewound > self.num_spec) | (start < 0) | (start > requests.context)
        stale &= ~fresh
        if stale.any():
            i = int(stale.argmax())
            raise RuntimeError(
                f"stale sidecar: magic {magic[i]:#x}, positions from {start[i]}, next position {upcoming[i]}, "
                f"but {requests.context[i]} tokens have been computed"
            )
        odd = start[start % self.fmt.unit != 0]
        if len(odd):
            raise RuntimeError(f"a prefix hit resumes at {odd[0]}, not at a multiple of {self.fmt.unit} tokens")

    # -- parts -----------------------------------------------------------------------------------------------------
    def _units(self, requests: Requests, pool: int, prefill: np.ndarray) -> tuple[Units | None, Index | None]:
        fmt, p = self.fmt, self.fmt.unit
        c, end = requests.context, requests.context + requests.new
        first, last = c // p, end // p
        owner, unit = ragged(first, last)
        if not len(unit):
            return None, None
        per_page = fmt.N // p
        page = requests.pages[owner, unit // per_page]
        position = unit[:, None] * p + np.arange(p)
        who = np.broadcast_to(owner[:, None], position.shape)
        old = position < c[who]
        rows = pool + requests.first_row[who] + position - c[who]
        rows[old] = self._ring_row(requests, who[old], position[old])
        # the page's first unit was packed in an earlier step
        follows = unit // per_page * per_page < first[owner]
        owners, mine = np.unique(owner, return_inverse=True)
        units = Units(
            self._long(page),
            self._long(unit % per_page),
            self._long(rows),
            self._long(mine),
            torch.from_numpy(follows).to(self.device),
            self._long(unit * p),
            torch.from_numpy(~prefill[owner]).to(self.device),
        )
        return units, self._state(requests, owners) if fmt.state_rows else None

    def _fits(self, requests: Requests, prefill: np.ndarray, fresh: np.ndarray) -> list[Fit]:
        fits = []
        for i in np.flatnonzero(prefill):
            block, slot = self._state(requests, np.array([i]))
            row = int(requests.first_row[i])
            rows = slice(row, row + int(requests.new[i]))
            fits.append(Fit(rows, (block[0], slot[0]), bool(fresh[i])))
        return fits

    def _groups(self, requests: Requests, boundary: np.ndarray, sinks: np.ndarray, pool: int) -> list[Group]:
        c = requests.context
        page_first = self.fmt.S // self.fmt.N
        groups = []
        for q in np.unique(requests.new):
            mine = np.flatnonzero(requests.new == q)
            rows = requests.first_row[mine, None] + np.arange(q)
            owner, page = ragged(
                np.full(len(mine), page_first),
                np.where(boundary[mine] > self.fmt.S, -(-boundary[mine] // self.fmt.N), 0),
            )
            origin = page * self.fmt.N
            chunk = bool(q > self.decode_queries)
            held = seen = None
            if c[mine].any():
                held, seen = self._held(requests, mine, boundary, sinks, pool, 0 if chunk else int(q))
            groups.append(
                Group(
                    self._long(rows),
                    _run(rows),
                    chunk,
                    torch.arange(0, rows.size + 1, int(q), dtype=torch.int32, device=self.device),
                    None if held is None else self._long(held),
                    None if seen is None else torch.from_numpy(seen).to(self.device),
                    PageList(
                        self._long(requests.pages[mine[owner], page]),
                        self._long(owner),
                        self._long(np.maximum(self.fmt.S - origin, 0)),
                        self._long(np.minimum(boundary[mine[owner]] - origin, self.fmt.N)),
                    ),
                )
            )
        return groups

    def _held(
        self, requests: Requests, mine: np.ndarray, boundary: np.ndarray, sinks: np.ndarray, pool: int, new: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """`Group.held` and `Group.seen`: sinks, then the ring with the `new` newest tokens in it; 0 for a chunk."""
        c, queries = requests.context, int(requests.new[mine[0]])
        ns, count = sinks[mine, None], (c - boundary)[mine, None] + new
        j = np.broadcast_to(np.arange(int((ns + count).max()))[None], (len(mine), int((ns + count).max())))
        position = boundary[mine, None] + j - ns
        who = np.broadcast_to(mine[:, None], j.shape)
        early, there = j < ns, j < ns + count
        held = np.full(j.shape, -1, np.int64)
        ring = there & ~early
        if new:
            held[ring] = self._ring_row(requests, who[ring], position[ring])
        else:
            # the copy holds the chunks' rings one after the other, by request
            copied = np.where(requests.new > self.decode_queries, c - boundary, 0)
            pool = int(copied.sum())
            held[ring] = (np.cumsum(copied) - copied)[who[ring]] + position[ring] - boundary[who[ring]]
        held[early] = pool + self._row(requests.sinks, who[early], j[early])
        # history is seen by every query, a new token by itself and the later ones
        seen = there[:, None] & ((position - c[mine, None])[:, None] <= np.arange(queries)[None, :, None])
        return held, seen

    # -- indices ---------------------------------------------------------------------------------------------------
    def _ring_row(self, requests: Requests, owner: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Row in the sidecar's pool of positions that lie in the ring."""
        return self._row(requests.sidecar, owner, self.slots.ring_at + position % self.slots.ring)

    def _row(self, table: np.ndarray, owner: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Row in a companion's pool: block * slots per block + slot in the block."""
        block, inner = self.slots.locate(table, owner, slot)
        return block.astype(np.int64) * self.slots.slots_per_block + inner

    def _state(self, requests: Requests, owner: np.ndarray) -> Index:
        slots = self.slots
        slot = np.broadcast_to(np.arange(slots.state_at, slots.ring_at), (len(owner), slots.state_slots))
        return self._index(requests.sidecar, owner[:, None], slot)

    def _index(self, table: np.ndarray, owner: np.ndarray, slot: np.ndarray) -> Index:
        block, inner = self.slots.locate(table, owner, slot)
        return self._long(block), self._long(inner)

    def _long(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(self.device)


def _run(rows: np.ndarray) -> slice | None:
    first = int(rows[0, 0])
    return slice(first, first + rows.size) if (rows.ravel() == first + np.arange(rows.size)).all() else None

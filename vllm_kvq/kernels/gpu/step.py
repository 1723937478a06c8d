"""One layer's whole step on a GPU: nothing is decided on the host, nothing is read back.

    begin     what happens to each request, from query_start, seq_lens and the sidecar's header; state and sinks
    pack      units that are complete now: ring and chunk -> pages
    attend    packed pages by block table; sinks, ring and the new tokens in place; one merge
    commit    the newest tokens into the ring, and the header

Grids follow from shapes and from the longest query alone, so a CUDA graph may replay a step whose lengths, tables and
headers have changed. Cache tensors are taken anew in every call. On CPU tensors the same code runs under Triton's
interpreter: that is how it is tested. No GPU has run it yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.innerq import HybridKeys
from vllm_kvq.formats.polar import PolarKeys
from vllm_kvq.formats.qjl import SketchKeys
from vllm_kvq.formats.squat import ChannelKeys, SQuatKeys
from vllm_kvq.kernels.gpu import cuda
from vllm_kvq.kernels.gpu.cuda import CUDA
from vllm_kvq.kernels.gpu.launch import SLOT_LAUNCH, pack_launch, power_of_two, raw_launch, raw_rows
from vllm_kvq.kernels.gpu.loading import interpreted, load
from vllm_kvq.kernels.gpu.paged import PagedKernels, merge_parts
from vllm_kvq.kernels.gpu.triton import TRITON, capability, constants, typed, value_block
from vllm_kvq.kernels.slots import SlotGeometry

Prefill = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, value, query_start on the device, its host copy, longest, scale) -> out (T, Hq, d), lse (T, Hq)."""


@dataclass(frozen=True)
class Batch:
    """The requests of one step. Tensors are on the device; `lengths` is the host's copy of the query lengths."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    side_table: torch.Tensor
    sink_table: torch.Tensor | None
    lengths: tuple[int, ...]
    """Upper bounds on a device that shortens drafts by itself. Padded requests have 0."""

    @property
    def requests(self) -> int:
        return len(self.lengths)

    def part(self, first: int, last: int) -> Batch:
        at = slice(first, last)
        sinks = None if self.sink_table is None else self.sink_table[at]
        return Batch(
            self.query_start[first : last + 1], self.seq_lens[at], self.table[at], self.side_table[at], sinks,
            self.lengths[at],
        )  # fmt: skip


@dataclass(frozen=True)
class Caches:
    """One layer's caches as vLLM holds them now."""

    pages: torch.Tensor
    """(blocks, H, record bytes) uint8."""
    sidecar: torch.Tensor
    """(blocks, elements) of the model's dtype, the last dimension dense."""
    sinks: torch.Tensor | None


def kernels_of(fmt: PageFormat) -> PagedKernels | None:
    """What packs and attends this format's pages; everything else of a step is Triton's for all formats."""
    return next((k for k in (TRITON, CUDA) if k.supports(fmt)), None)


def supports(fmt: PageFormat) -> bool:
    return kernels_of(fmt) is not None


def pack_constants(fmt: PageFormat) -> dict[str, Any]:
    """The Triton pack kernel's compile-time constants of a format's layout."""
    k, known = fmt.keys, constants(fmt)
    if known is None:
        raise ValueError(f"{fmt.name} has no Triton kernel that packs its keys or values")
    names: tuple[str, ...] = ("HEAD", "D", "SLABS", "SLABS_AT", "SLAB_WORDS", "KEYS", "K_BITS", "K_CODES", "K_SCALE")
    names += ("K_ZERO", "K_PAGE", "ROTARY", "INTERLEAVED", "RADIUS_BITS", "PAPER")
    names += ("VALUES", "V_BITS", "V_GROUP", "V_CODES", "V_SCALE", "V_ZERO")
    own = {name: known[name] for name in names} | {"RANK": 0, "UPDATE": fmt.geometry.d, "LAMBDA": 1.0}
    own["V_BLOCK"] = value_block(fmt)
    if isinstance(k, SQuatKeys):
        own |= {"RANK": k.state_rows, "UPDATE": k.block, "LAMBDA": k.lam}
    if isinstance(k, ChannelKeys):
        block = math.gcd(k.d * k.bits // 8, own["UPDATE"])
    elif isinstance(k, HybridKeys):
        block = math.gcd(k.d * k.bits // 8, 32)
    else:
        assert isinstance(k, PolarKeys)
        block = math.gcd(k.pairs if k.nibbles else k.pairs * min(k.m, k.n) // 8, 16)
    return own | {"K_BLOCK": block & -block, "UNIT": fmt.unit, "W": fmt.W, "TOKENS": power_of_two(fmt.unit)}


class DeviceStep:
    """The step of all layers that share a format and a cut of their companions."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry, num_spec: int, device: torch.device) -> None:
        kernels = kernels_of(fmt)
        if kernels is None:
            raise ValueError(f"{TRITON.why_not(fmt)}; {CUDA.why_not(fmt)}")
        load()
        self.kernels = kernels
        if kernels is CUDA:  # now, not in the first request or in a graph's capture; says so if it can't be built
            cuda.library(device)
            cuda.bind(fmt, device)
        self.fmt, self.slots, self.num_spec = fmt, slots, num_spec
        size = fmt.geometry.dtype.itemsize
        words = slots.slot_bytes // 4
        self._cut = {"SPB": slots.slots_per_block, "SLOT": slots.slot_bytes // size}
        self._ring = {"RING": slots.ring, "RING_AT": slots.ring_at}
        self._words = {"WORDS": words}
        self.interpreted = interpreted()
        self._columns = {"HEAD": fmt.geometry.head_size, "COLUMNS": power_of_two(fmt.geometry.d)}
        self._layout = pack_constants(fmt) if kernels is TRITON else {}
        self._rank = fmt.state_rows if isinstance(fmt.keys, SQuatKeys) else 0
        self.faults = torch.zeros(2, dtype=torch.int32, device=device)
        """Steps of requests whose sidecar was stale, and elements that had to be replaced before packing."""

    @property
    def fits_queries(self) -> bool:
        """Whether a request's state depends on its prompt's queries, and not on its keys alone."""
        return self._rank > 0

    @property
    def decode_queries(self) -> int:
        return 1 + self.num_spec

    def run(
        self,
        batch: Batch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        prefill: Prefill | None = None,
        all_queries: torch.Tensor | None = None,
    ) -> None:
        """query (T, Hq, head_size), key and value (T, H, head_size) -> output (T, Hq, head_size), dense.

        `all_queries`: those of other ranks that hold a copy of the same KV heads, too (`fits_queries`).
        Requests of up to 1 + num_spec queries come first, as vLLM orders them; if they do not, everything is served
        as prefill. `prefill` attends the new tokens of longer chunks causally; None: the Triton kernel does.
        """
        if not batch.requests or not len(query):
            return
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        fit_query = query if all_queries is None else all_queries
        plan = self._begin(batch, caches, fit_query, key, value)
        decodes = next((i for i, q in enumerate(batch.lengths) if q > self.decode_queries), batch.requests)
        if decodes < batch.requests and self._rank:
            self._fit(batch, caches, plan, fit_query, decodes)
        self._pack_units(batch, caches, plan, key, value)
        self._attend(batch, caches, plan, decodes, query, key, value, output, scale, prefill)
        self._commit(batch, caches, plan, key, value)

    # -- parts -----------------------------------------------------------------------------------------------------
    def _begin(
        self, batch: Batch, caches: Caches, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        from vllm_kvq.triton_kernels.step import begin_kernel

        side, n = caches.sidecar, batch.requests
        plan = torch.empty(8, n, dtype=torch.int32, device=query.device)
        words, floats = side.view(torch.int32), side.view(torch.float32)
        sinks, sink_table = _or(caches.sinks, side), _or(batch.sink_table, batch.side_table)
        share = query.shape[1] // self.slots.heads
        begin_kernel[(n, self.slots.heads)](
            *(batch.query_start, batch.seq_lens, batch.side_table, sink_table, words, floats, sinks, query, key, value),
            *(plan, self.faults, n, batch.side_table.stride(0), sink_table.stride(0), side.shape[0], sinks.shape[0]),
            *(words.stride(0), sinks.stride(0), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
            **self.begin_constants(share),
            **SLOT_LAUNCH.options,
        )
        return plan

    def begin_constants(self, share: int) -> dict[str, Any]:
        fmt = self.fmt
        return (
            self._columns
            | self._cut
            | self._words
            | {
                "HEADS": self.slots.heads,
                "SHARE": share,
                "D": fmt.geometry.d,
                "UNIT": fmt.unit,
                "W": fmt.W,
                "S": fmt.S,
                "SPEC": self.num_spec,
                "SIDE_BLOCKS": self.slots.sidecar_blocks,
                "NORM": isinstance(fmt.keys, HybridKeys),
                "ENERGY": isinstance(fmt.keys, SketchKeys) and fmt.state_rows > 0,
                "RANK": self._rank,
                "ROWS": max(16, power_of_two(self.decode_queries * share)),
            }
        )

    def _fit(self, batch: Batch, caches: Caches, plan: torch.Tensor, query: torch.Tensor, first: int) -> None:
        """SQuat's subspace after one more chunk of a prompt, in float64. Only prefill steps come here."""
        fmt, slots, heads = self.fmt, self.slots, self.slots.heads
        rows, d = fmt.state_rows, fmt.geometry.d
        floats = caches.sidecar.view(torch.float32)
        words = slots.slot_bytes // 4
        index = torch.arange(heads * rows * d, device=query.device)
        slot = 1 + index // words
        block = batch.side_table[first:, slot // slots.slots_per_block].long()
        column = slot % slots.slots_per_block * words + index % words
        alive = (plan[1, first:] > 0) & ((block > 0) & (block < len(floats))).all(1)
        block = torch.where(alive[:, None], block, 0)
        before = floats[block, column]
        fresh = plan[7, first:] != 0
        starts = torch.tensor([0, *batch.lengths], dtype=torch.long).cumsum(0).tolist()
        grams = []
        for i in range(first, batch.requests):
            q = fmt.widen(query[starts[i] : starts[i + 1]])[0].unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
            q = q.double()
            grams.append(q.transpose(1, 2) @ q)
        state = before.view(-1, heads, rows, d).double() * ~fresh[:, None, None, None]
        gram = torch.stack(grams) + state.transpose(2, 3) @ state
        eigenvalues, vectors = torch.linalg.eigh(gram)
        top = eigenvalues[..., -rows:].flip(-1).clamp_min(0).sqrt()
        after = (top.unsqueeze(-1) * vectors[..., -rows:].flip(-1).transpose(2, 3)).float().flatten(1)
        fits = alive & torch.tensor([q > self.decode_queries for q in batch.lengths[first:]], device=query.device)
        floats[block, column] = torch.where(fits[:, None], after, before)

    def _pack_units(
        self, batch: Batch, caches: Caches, plan: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        from vllm_kvq.triton_kernels.pack import pack_kernel

        fmt, side, pages, n = self.fmt, caches.sidecar, caches.pages, batch.requests
        units = (max(batch.lengths) + fmt.unit - 1) // fmt.unit
        if self.kernels is CUDA:
            tables = batch.table, batch.side_table
            cuda.pack(fmt, self.slots, plan, *tables, side, key, value, pages, self.faults, units)
            return
        words, halves = typed(pages)
        floats = side.view(torch.float32)
        pack_kernel[(n * units, self.slots.heads)](
            *(
                plan,
                batch.table,
                batch.side_table,
                side,
                floats,
                key,
                value,
                words,
                halves,
                pages,
                self.faults,
                n,
                units,
            ),
            *(batch.table.stride(0), batch.table.shape[1], batch.side_table.stride(0), pages.shape[0], side.shape[0]),
            *(floats.stride(0), side.stride(0), *key.stride()[:2], *value.stride()[:2], *words.stride()[:2]),
            **self.pack_constants(),
            **pack_launch(fmt, capability(pages.device)).options,
        )

    def pack_constants(self) -> dict[str, Any]:
        return self._cut | self._words | self._ring | self._layout | {"HEADS": self.slots.heads}

    def _attend(
        self,
        batch: Batch,
        caches: Caches,
        plan: torch.Tensor,
        decodes: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        prefill: Prefill | None,
    ) -> None:
        n, heads = batch.requests, query.shape[1]
        parts = [(0, decodes), (decodes, n)]
        longest = [max(batch.lengths[a:b], default=0) for a, b in parts]
        splits = [
            self.kernels.splits_of(self.fmt, b - a, most, heads, batch.table, caches.pages) if b > a else 0
            for (a, b), most in zip(parts, longest, strict=True)
        ]
        packed = max(splits)
        own = decodes < n and prefill is not None
        out = query.new_empty(packed + 1 + own, *query.shape, dtype=torch.float32)
        lse = query.new_empty(out.shape[:-1], dtype=torch.float32)
        if own or (0 < decodes < n and len(set(splits)) > 1):  # not every part is written for every row
            lse.fill_(-torch.inf)
        for (a, b), count, most in zip(parts, splits, longest, strict=True):
            if b == a:
                continue
            some, alone = batch.part(a, b), own and a == decodes
            self.kernels.launch_attend(
                self.fmt, query[None], caches.pages, some.table, plan[4, a:b], plan[5, a:b], out[:count], lse[:count],
                scale, some.query_start, most,
            )  # fmt: skip
            self._raw(some, caches, plan, a, most, query, key, value, out[packed], lse[packed], scale, alone)
        if own and prefill is not None:
            first = sum(batch.lengths[:decodes])
            lengths = batch.lengths[decodes:]
            start = batch.query_start[decodes:] - first
            new, new_lse = prefill(query[first:], key[first:], value[first:], start, lengths, scale)
            out[-1, first : first + len(new)], lse[-1, first : first + len(new)] = new, new_lse
        merge_parts(out, lse, output, batch.query_start[n:])

    def _raw(
        self,
        batch: Batch,
        caches: Caches,
        plan: torch.Tensor,
        first: int,
        longest: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        without_new: bool,
    ) -> None:
        from vllm_kvq.triton_kernels.raw import raw_kernel

        side, share = caches.sidecar, query.shape[1] // self.slots.heads
        sinks, sink_table = _or(caches.sinks, side), _or(batch.sink_table, batch.side_table)
        sizes = self.raw_constants(share, longest, not without_new)
        tiles = -(-longest * share // sizes["M"])
        raw_kernel[(batch.requests * self.slots.heads * tiles,)](
            *(plan[:, first:], batch.query_start, batch.side_table, sink_table, side, sinks, query, key, value),
            *(out, lse, scale, plan.shape[1], longest, batch.side_table.stride(0), sink_table.stride(0), side.shape[0]),
            *(sinks.shape[0], side.stride(0), sinks.stride(0), *query.stride()[:2], *key.stride()[:2]),
            *value.stride()[:2],
            **sizes,
            **raw_launch(self.fmt).options,
        )

    def raw_constants(self, share: int, longest: int, new: bool = True) -> dict[str, Any]:
        own = {"HEADS": self.slots.heads, "SHARE": share, "S": self.fmt.S, "NEW": new, "WIDE": self.interpreted}
        # float32 is exact: its products do not go through tf32
        exact = self.fmt.geometry.dtype == torch.float32
        tile = {"M": raw_rows(self.fmt, longest * share), "TOKENS": 32, "PRECISION": "ieee" if exact else "tf32"}
        return self._columns | self._cut | self._ring | own | tile

    def _commit(self, batch: Batch, caches: Caches, plan: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        from vllm_kvq.triton_kernels.step import commit_kernel

        side, n = caches.sidecar, batch.requests
        words = side.view(torch.int32)
        most = min(max(batch.lengths), self.slots.ring)
        tokens = min(16, power_of_two(most))
        commit_kernel[(n, -(-most // tokens), self.slots.heads)](
            *(plan, batch.side_table, words, side, key, value, n, batch.side_table.stride(0), side.shape[0]),
            *(words.stride(0), side.stride(0), *key.stride()[:2], *value.stride()[:2]),
            **self.commit_constants(tokens),
            **SLOT_LAUNCH.options,
        )

    def commit_constants(self, tokens: int) -> dict[str, Any]:
        return self._columns | self._cut | self._ring | {"HEADS": self.slots.heads, "TOKENS": tokens}


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if x is None else x

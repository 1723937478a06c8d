"""One layer's whole step on a GPU: nothing is decided on the host, nothing is read back.

    begin     what happens to each request, from query_start, seq_lens and the sidecar's header; state and sinks
    pack      units that are complete now: ring and new tokens -> pages
    attend    packed pages by block table; sinks, ring and the new tokens in place; one merge
    commit    the newest tokens into the ring, and the header; after the last of the layers that share the caches

Pages are packed and attended by the kernels that support the format (Triton's or CUDA's), everything else by Triton's.
Grids follow only from shapes and the longest query, so a CUDA graph may replay a step whose lengths, tables and headers
have changed. Every call is given the cache tensors again. On CPU tensors the same code runs under Triton's interpreter:
that is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.methods.squat import Corrected
from vllm_kvq.kernels.gpu.cuda import CUDA
from vllm_kvq.kernels.gpu.history import History
from vllm_kvq.kernels.gpu.history import attend as attend_history
from vllm_kvq.kernels.gpu.launch import SLOT_LAUNCH, full_precision_launch, full_precision_rows, power_of_two
from vllm_kvq.kernels.gpu.loading import interpreted, load
from vllm_kvq.kernels.gpu.paged import PackSource, PagedKernels, PageTable, Ragged, merge_parts
from vllm_kvq.kernels.gpu.triton.kernels import TRITON
from vllm_kvq.kernels.gpu.triton.layout import companion, record, state_constants
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Prompts, StepBatch, Whole

KINDS: tuple[PagedKernels, ...] = (TRITON, CUDA)


def kernels_of(fmt: PageFormat, capped: bool = False) -> PagedKernels | None:
    """The kernels that pack and attend this format's pages; everything else of a step is Triton's for all formats.

    `capped`: scores have a soft cap.
    """
    return next((k for k in KINDS if k.why_not(fmt, capped) is None), None)


def why_not(fmt: PageFormat, capped: bool = False) -> str:
    """One sentence on why no kind of kernels serves this format."""
    return "; ".join(k.why_not(fmt, capped) or "" for k in KINDS)


@dataclass(frozen=True, eq=False)
class Attended:
    """What a step attends, for layers that share the caches (`Caches.shared`)."""

    plan: torch.Tensor
    decodes: int
    key: torch.Tensor
    value: torch.Tensor


class GPUStep:
    """`kernels.step.Step` of all layers that share a format, the layout of their companions and a scale.

    Requests of up to 1 + num_spec new tokens come first, as vLLM orders them; if they do not, everything is served as
    prompts. `prompts` attend the new tokens of prompts, and the history of long chunks (history.py); None: the kernels
    for tokens in full precision and for pages do. `all_queries` extends queries by those of other ranks that hold a
    copy of the same KV heads. `cap`: the soft cap of scores; 0: none.
    """

    def __init__(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        num_spec: int,
        scale: float,
        device: torch.device,
        prompts: Prompts | None = None,
        all_queries: Callable[[torch.Tensor], torch.Tensor] | None = None,
        cap: float = 0.0,
    ) -> None:
        kernels = kernels_of(fmt, cap > 0)
        if kernels is None:
            raise ValueError(why_not(fmt, cap > 0))
        load()
        kernels.prepare(fmt, device)
        self.fmt, self.slots, self.num_spec, self.scale, self.kernels = fmt, slots, num_spec, scale, kernels
        self.prompts, self.all_queries, self.cap = prompts, all_queries, cap
        self._sizes = {"R": record(fmt), "C": companion(slots)}
        self._state = state_constants(fmt)
        self.interpreted = interpreted()
        self.faults = torch.zeros(2, dtype=torch.int32, device=device)
        """Counters: steps of requests whose sidecar was stale, and elements that were replaced before packing."""

    @property
    def fits_queries(self) -> bool:
        """Whether a request's state depends on its prompt's queries, and not only on its keys."""
        return self.fmt.state_rows > 0 and self.fmt.keys.fits_queries

    @property
    def decode_queries(self) -> int:
        return 1 + self.num_spec

    def run(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int:
        if not batch.requests or not len(query):
            return 0
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        fit_query = self.all_queries(query) if self.all_queries is not None and self.fits_queries else query
        plan = self._begin(batch, caches, fit_query, key, value)
        decodes = next((i for i, q in enumerate(batch.lengths) if q > self.decode_queries), batch.requests)
        if decodes < batch.requests and self.fits_queries:
            self._fit(batch, caches, plan, fit_query, decodes)
        self._pack(batch, caches, plan, key, value)
        if caches.readers:
            caches.shared = Attended(plan, decodes, key.clone(), value.clone())
        self._attend(batch, caches, plan, decodes, query, key, value, output)
        if not caches.readers:
            self._commit(batch, caches, plan, key, value)
        return 0

    def share(self, batch: StepBatch, caches: Caches, query: torch.Tensor, output: torch.Tensor) -> None:
        shared: Attended | None = caches.shared
        last = caches.read()
        if shared is None:  # no request has new tokens
            return
        query = query if query.stride(-1) == 1 else query.contiguous()
        self._attend(batch, caches, shared.plan, shared.decodes, query, shared.key, shared.value, output)
        if last:
            self._commit(batch, caches, shared.plan, shared.key, shared.value)

    # -- parts -----------------------------------------------------------------------------------------------------
    def _begin(
        self, batch: StepBatch, caches: Caches, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        from vllm_kvq.triton_kernels.step import begin_kernel

        side, n = caches.sidecar, batch.requests
        plan = torch.empty(8, n, dtype=torch.int32, device=query.device)
        words, floats = side.view(torch.int32), side.view(torch.float32)
        sinks, sink_table = _or(caches.sinks, side), _or(batch.sink_table, batch.side_table)
        share = query.shape[1] // self.slots.heads
        begin_kernel[(n, self.slots.heads)](
            *(
                batch.device_start,
                batch.seq_lens,
                batch.side_table,
                sink_table,
                words,
                floats,
                sinks,
                query,
                key,
                value,
            ),
            *(plan, self.faults, n, batch.side_table.stride(0), sink_table.stride(0), side.shape[0], sinks.shape[0]),
            *(words.stride(0), sinks.stride(0), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
            **self.begin_constants(share),
            **SLOT_LAUNCH.options,
        )
        return plan

    def begin_constants(self, share: int) -> dict[str, Any]:
        fmt = self.fmt
        rules = {"W": fmt.W, "S": fmt.S, "SPEC": self.num_spec}
        rows = {"SHARE": share, "ROWS": max(16, power_of_two(self.decode_queries * share))}
        return self._sizes | rules | rows | self._state

    def _fit(self, batch: StepBatch, caches: Caches, plan: torch.Tensor, query: torch.Tensor, first: int) -> None:
        """SQuat's subspace after one more chunk of a prompt, in float64. Called only in prefill steps."""
        fmt, slots, heads = self.fmt, self.slots, self.slots.heads
        rows, d = fmt.state_rows, fmt.geometry.d
        floats = caches.sidecar.view(torch.float32)
        words = slots.slot_bytes // 4
        index = torch.arange(heads * rows * d, device=query.device)
        slot = slots.state_at + index // words
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
        # a new request's slots may hold anything
        state = torch.where((alive & ~fresh)[:, None], before, 0).view(-1, rows, d)
        after = cast(Corrected, fmt.keys).fit_gram(torch.cat(grams), state).view(len(before), -1)
        fits = alive & torch.tensor([q > self.decode_queries for q in batch.lengths[first:]], device=query.device)
        floats[block, column] = torch.where(fits[:, None], after, before)

    def _pack(
        self, batch: StepBatch, caches: Caches, plan: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        units = (max(batch.lengths) + self.fmt.unit - 1) // self.fmt.unit
        source = PackSource(plan, batch.table, batch.side_table, caches.sidecar, key, value, units)
        self.kernels.pack(self.fmt, self.slots, source, caches.pages, self.faults)

    def _attend(
        self,
        batch: StepBatch,
        caches: Caches,
        plan: torch.Tensor,
        decodes: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        n, heads = batch.requests, query.shape[1]
        own = self.prompts if decodes < n else None
        history = self._history(batch, caches, plan, decodes, heads, own)
        paged = [(0, decodes, plan[5, :decodes]), (decodes, n, plan[5, decodes:] if history is None else history.high)]
        longest = [max(batch.lengths[a:b], default=0) for a, b, _ in paged]
        splits = [
            self.kernels.splits_of(self.fmt, b - a, most, heads, batch.table, caches.pages) if b > a else 0
            for (a, b, _), most in zip(paged, longest, strict=True)
        ]
        if history is not None and not history.others:
            splits[1] = 0
        packed = max(splits)
        learned = caches.learned is not None
        unpacked = history is not None and len(history.spans) > 0
        out = query.new_empty(packed + 1 + learned + unpacked + (own is not None), *query.shape, dtype=torch.float32)
        lse = query.new_empty(out.shape[:-1], dtype=torch.float32)
        if own is not None or (0 < decodes < n and len(set(splits)) > 1):  # not every part is written for every row
            lse.fill_(-torch.inf)
        if caches.learned is not None:
            out[packed + 1], lse[packed + 1] = 0.0, caches.learned.float()
        for (a, b, high), count, most in zip(paged, splits, longest, strict=True):
            if b == a:
                continue
            if count:
                table, into = PageTable(batch.table[a:b], plan[4, a:b], high), (out[:count], lse[:count])
                theirs = sum(batch.lengths[:b]) if b < n else None
                ragged = Ragged(batch.device_start[a : b + 1], most, theirs)
                at = self.scale, self.cap
                self.kernels.launch_attend(self.fmt, query[None], caches.pages, table, into, *at, ragged)
            new = own is None or a != decodes
            self._full_precision(batch, caches, plan, (a, b), most, query, key, value, out[packed], lse[packed], new)
        if own is not None and history is not None:
            self._unpacked(own, batch, caches, history, query, out[-2], lse[-2])
        if own is not None:
            self._new_tokens(own, batch, decodes, query, key, value, out[-1], lse[-1])
        merge_parts(out, lse, output, batch.device_start[n:])

    def _unpacked(
        self,
        own: Prompts,
        batch: StepBatch,
        caches: Caches,
        history: History,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attends the history of long chunks."""
        for span in history.spans:
            mine = span.queries
            of = query[mine], caches.pages, batch.table[span.request], span
            by = cast(Whole, own.whole), self.scale, self.cap, self.faults
            part = attend_history(self.kernels, self.fmt, *of, *by)
            out[mine], lse[mine] = part

    def _new_tokens(
        self,
        own: Prompts,
        batch: StepBatch,
        decodes: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attends the new tokens of prompts among themselves."""
        first, end = sum(batch.lengths[:decodes]), sum(batch.lengths)
        tokens = (x[first:] for x in (query, key, value))
        start = batch.device_start[decodes:] - first
        attended, its_lse = own.causal(*tokens, start, batch.lengths[decodes:], self.scale, self.cap)
        if its_lse is None:
            raise TypeError("attention among the new tokens of a chunk must return its log-sum-exp")
        out[first:end], lse[first:end] = attended, its_lse

    def _history(
        self, batch: StepBatch, caches: Caches, plan: torch.Tensor, decodes: int, query_heads: int, own: Prompts | None
    ) -> History | None:
        """Made by the first layer, and used by all with an equal plan. None: nothing is worth unpacking."""
        share = query_heads // self.slots.heads
        able = own is not None and own.whole is not None and self.kernels.unpacks
        if not able or not History.worthwhile(batch, decodes, share):
            return None
        planned = History, self.fmt.N, self.fmt.unit, self.fmt.W, self.fmt.S, self.num_spec
        found = batch.kept.get(planned)
        if found is None:
            found = batch.kept[planned] = History.of(self.fmt, batch, caches.pages, plan, decodes, share)
        return cast(History, found)

    def _full_precision(
        self,
        batch: StepBatch,
        caches: Caches,
        plan: torch.Tensor,
        part: tuple[int, int],
        longest: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        new: bool,
    ) -> None:
        """Attends what the requests [part) keep in full precision: sinks, ring and, with `new`, their new tokens."""
        from vllm_kvq.triton_kernels.full_precision import full_precision_kernel

        first, last = part
        side, share = caches.sidecar, query.shape[1] // self.slots.heads
        side_table = batch.side_table[first:last]
        sinks = _or(caches.sinks, side)
        sink_table = side_table if batch.sink_table is None else batch.sink_table[first:last]
        sizes = self.full_precision_constants(share, longest, new)
        tiles = -(-longest * share // sizes["M"])
        full_precision_kernel[((last - first) * self.slots.heads * tiles,)](
            *(plan[:, first:], batch.device_start[first:], side_table, sink_table, side, sinks, query, key, value),
            *(out, lse, self.scale, plan.shape[1], longest, side_table.stride(0), sink_table.stride(0), side.shape[0]),
            *(sinks.shape[0], side.stride(0), sinks.stride(0), *query.stride()[:2], *key.stride()[:2]),
            *(*value.stride()[:2], self.cap),
            **sizes,
            **full_precision_launch(self.fmt).options,
        )

    def full_precision_constants(self, share: int, longest: int, new: bool = True) -> dict[str, Any]:
        own = {"SHARE": share, "S": self.fmt.S, "NEW": new, "WIDE": self.interpreted}
        own["CAPPED"] = self.cap > 0
        # float32 is exact: its products do not go through tf32
        exact = self.fmt.geometry.dtype == torch.float32
        rows = full_precision_rows(self.fmt, longest * share)
        tile = {"M": rows, "TOKENS": 32, "PRECISION": "ieee" if exact else "tf32"}
        return self._sizes | own | tile

    def _commit(
        self, batch: StepBatch, caches: Caches, plan: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
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
        return self._sizes | {"TOKENS": tokens}


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if x is None else x

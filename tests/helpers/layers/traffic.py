"""A small scheduler whose random traffic two implementations of a layer serve, each in caches of its own: arrivals,
chunks, decoding with rejected drafts, prefix hits, preemption and reuse of blocks, padded requests.

The first implementation is planned on the host. After every step both must hold the same bytes and give the same
answers, and pages that a request found by a prefix hit must be as they were before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol
from unittest import mock

import numpy as np
import torch

from proof.kernels.exact import relative_error
from vllm_kvq.bench.pools import calibrated, outlier_data
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.methods.squat import SQuatKeys
from vllm_kvq.kernels.cpu import call
from vllm_kvq.kernels.cpu.library import ISAS, isa
from vllm_kvq.kernels.paths import Wish, kernels_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch
from vllm_kvq.kernels.torch.step import Planned, PlannedStep

H, SHARE, SPEC, WIDTH = 2, 2, 2, 40


class Implementation(Protocol):
    exact: bool
    """Packs with the first implementation's kernels, so that all bytes of the pages are equal."""

    def run(
        self, batch: StepBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None: ...

    def check_padding(self, output: torch.Tensor) -> None:
        """Check the rows that belong to no request."""


@dataclass
class Request:
    length: int
    """Tokens of its prompt; more are decoded."""
    side: list[int]
    sinks: list[int]
    pages: list[int]
    tokens: int = 0
    hit: int = 0
    rejected: int = 0
    seed: int = 0


@dataclass
class World:
    """One scheduler and two implementations of a layer."""

    fmt: PageFormat
    seed: int
    build: Callable[[World], Implementation]
    """Makes the second implementation; its caches are `caches(1)`."""
    blocks: int = 300
    requests: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        fmt = self.fmt
        self.inside = 0
        """First steps after a hit that are as small as decode steps."""
        self.rng, self.noise = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        self.slots = SlotGeometry.of(fmt, H, SPEC)
        self.free = list(range(1, self.blocks))
        self.rng.shuffle(self.free)
        device = torch.device("cpu")
        elements = self.slots.page_bytes // fmt.geometry.dtype.itemsize
        pools = [torch.zeros(self.blocks, elements, dtype=fmt.geometry.dtype) for _ in range(4)]
        pages = [torch.zeros(self.blocks, H, 1, fmt.record_bytes, dtype=torch.uint8) for _ in range(2)]
        self.side, self.sinks = pools[:2], pools[2:]
        # what others left there
        for x in self.sinks:
            x.fill_(torch.nan)
        self.pages = pages
        self.scale = fmt.geometry.head_size**-0.5
        self.step = PlannedStep(fmt, self.slots, SPEC, self.scale, device, kernels_for(fmt, Wish("cpu")))
        self.other = self.build(self)

    def caches(self, i: int) -> Caches:
        return Caches(self.pages[i].flatten(2), self.side[i], self.sinks[i] if self.fmt.S else None)

    # -- scheduler -------------------------------------------------------------------------------------------------
    def take(self, count: int, zero: bool) -> list[int]:
        ids = [self.free.pop() for _ in range(count)]
        for x in self.side if zero else ():
            x[ids] = 0
        for x in self.pages:  # vLLM zeroes new pages, too
            x[ids] = 0
        return ids

    def admit(self, length: int, of: Request | None = None) -> Request:
        """With `of`: a prefix hit on that request's complete pages; the last W tokens are its own."""
        n = self.fmt.N
        shared = min(of.tokens, length - 1 - self.fmt.W) // n if of else 0
        if of is None or shared * n <= (self.fmt.N if self.fmt.S else 0):
            shared, of = 0, None
        request = Request(
            length,
            self.take(self.slots.sidecar_blocks, True),
            of.sinks if of else self.take(self.slots.sink_blocks, False),
            list(of.pages[:shared]) if of else [],
            seed=of.seed if of else self.rng.randrange(1 << 30),
        )
        request.hit = shared * n
        request.tokens = shared * n
        return request

    def preempt(self, request: Request) -> None:
        self.free = request.side + self.free
        request.side = self.take(self.slots.sidecar_blocks, True)
        if not request.hit:
            self.free = request.pages + self.free
        request.pages, request.tokens, request.hit = [], 0, 0
        request.sinks = self.take(self.slots.sink_blocks, False)

    def chunk(self, request: Request, budget: int) -> int:
        """New tokens of this step: part of the prompt, or one token with up to SPEC drafts, some of them rejected."""
        if request.tokens < request.length:
            count = min(budget, request.length - request.tokens)
            if request.hit and request.tokens == request.hit:
                count = min(count, 1 + SPEC)
                self.inside += 1
        else:
            rejected = self.rng.randrange(min(SPEC, request.tokens - request.length, request.rejected) + 1)
            request.tokens -= rejected
            count = 1 + self.rng.randrange(SPEC + 1)
            request.rejected = count - 1
        while len(request.pages) * self.fmt.N < request.tokens + count:
            request.pages += self.take(1, False)
        return count

    # -- a step ----------------------------------------------------------------------------------------------------
    def data(self, requests: list[Request], counts: list[int]) -> tuple[torch.Tensor, ...]:
        fmt = self.fmt
        d = fmt.geometry.head_size
        keys, values = [], []
        for r, count in zip(requests, counts, strict=True):
            k, v = outlier_data(count, H, d, r.seed + r.tokens)
            keys.append(k.transpose(0, 1))
            values.append(v.transpose(0, 1))
        total = sum(counts)
        query = torch.randn(total, H * SHARE, d, generator=self.noise)
        return tuple(x.to(fmt.geometry.dtype) for x in (query, torch.cat(keys), torch.cat(values)))

    def table(self, rows: list[list[int]], padded: int) -> torch.Tensor:
        out = torch.zeros(len(rows) + padded, WIDTH, dtype=torch.int32)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return out

    def run(self, requests: list[Request], budget: int, padded: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [self.chunk(r, budget) for r in requests]
        order = sorted(range(len(requests)), key=lambda i: counts[i] > 1 + SPEC)
        requests, counts = [requests[i] for i in order], [counts[i] for i in order]
        query, key, value = self.data(requests, counts)
        found = torch.tensor([p for r in requests for p in r.pages[: r.hit // self.fmt.N]], dtype=torch.long)
        shared = [x[found] for x in self.pages]
        lengths = [*counts, *[0] * padded]
        start = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        seq = torch.tensor(
            [r.tokens + c for r, c in zip(requests, counts, strict=True)] + [0] * padded, dtype=torch.int32
        )
        pages, side, sinks = (self.table([getattr(r, x) for r in requests], padded) for x in ("pages", "side", "sinks"))
        side, sinks = side[:, : self.slots.sidecar_blocks], sinks[:, : self.slots.sink_blocks]

        want = torch.zeros_like(query)
        batch = StepBatch(start, start, seq, pages, side, sinks if self.fmt.S else None, max(lengths))
        caches = self.caches(0)
        plan = self.step.plan(batch.derived(Planned), caches)
        ring, _ = self.step.update(plan, caches, query, key, value)
        # a device's floats are compared with floats, not with the fixed point of this processor's integer kernels
        level = isa() if self.other.exact else ISAS.index("portable")
        with mock.patch.object(call, "isa", return_value=level):
            self.step.attend(plan, caches, ring, query, key, value, want)

        # two rows beyond the last request's, as a padded graph has them
        wide = [torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in (query, key, value)]
        got = torch.full_like(wide[0], torch.nan)
        self.other.run(replace(batch), *wide, got)
        self.other.check_padding(got[len(query) :])
        for x, before in zip(self.pages, shared, strict=True):
            assert torch.equal(x[found], before), "a step wrote into pages that other requests share"
        for r, c in zip(requests, counts, strict=True):
            r.tokens += c
        return got[: len(query)], want

    # -- judgement -------------------------------------------------------------------------------------------------
    def states(self, pool: torch.Tensor) -> torch.Tensor:
        """Each running request's InnerQ norm, QJL energies, SQuat noise and U^T U (U is free to rotate)."""
        geo, fmt = self.slots, self.fmt
        grams = []
        for r in self.requests:
            slots = pool[:, : geo.slots_per_block * geo.slot_bytes // geo.itemsize].unflatten(
                1, (geo.slots_per_block, -1)
            )
            at = [(r.side[s // geo.slots_per_block], s % geo.slots_per_block) for s in range(geo.state_at, geo.ring_at)]
            raw = torch.cat([slots[b, s] for b, s in at]).view(torch.float32)[: geo.state_bytes // 4]
            rows = raw.view(H, fmt.state_rows, -1).double()
            if isinstance(fmt.keys, SQuatKeys):
                u, noise = rows[:, :-1], rows[:, -1:]
                rows = torch.cat([noise, u.transpose(1, 2) @ u], dim=1)
            grams.append(rows)
        return torch.stack(grams)

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        fmt = self.fmt
        error = relative_error(got, want.double())
        assert error < (1e-3 if fmt.geometry.dtype == torch.float32 else 1e-2), error
        flat = [x.flatten(1).view(torch.uint8).clone() for x in self.side]
        if fmt.state_rows:
            a, b = (self.states(x) for x in self.side)
            assert relative_error(b, a) < 1e-5
            first = self.slots.slot_bytes
            for x in flat:
                for r in self.requests:
                    for s in range(self.slots.state_at, self.slots.ring_at):
                        at = s % self.slots.slots_per_block * first
                        x[r.side[s // self.slots.slots_per_block], at : at + first] = 0
        running = torch.tensor([b for r in self.requests for b in r.side])
        assert torch.equal(flat[0][running], flat[1][running])
        used = torch.tensor([b for r in self.requests for b in r.pages if b], dtype=torch.long)
        a, b = (x[used] for x in self.pages)
        assert torch.equal(a[..., :64], b[..., :64])  # magic and flags
        differ = (a != b).float().mean() if len(used) else 0
        # sums in another order (SQuat), another atan2 (PolarQuant) or square root (InnerQ's norm, 1e-7 off) move a
        # value over a boundary now and then
        exact = self.other.exact or type(fmt.keys).__name__ == "ChannelKeys"
        assert differ <= (0 if exact else 2e-3), f"{differ:.5f} of the bytes differ"


def simulate(
    build: Callable[[World], Implementation],
    name: str,
    d: int,
    n: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: object,
) -> World:
    geometry = Geometry(d, n, dtype, pairing=str(options.pop("pairing", "half")))
    fmt = calibrated(get_format(name).bind(geometry, options), H)
    world = World(fmt, seed, build)
    rng = world.rng
    first = world.admit(2 * n + fmt.W + rng.randrange(1, 20))
    world.requests = [first, world.admit(1)]
    budget = n + 13
    for step in range(8):
        if step == 3:
            world.requests.append(world.admit(first.tokens - 1, of=first))
            world.requests.append(world.admit(rng.randrange(2, n)))
        if step == 6:
            world.preempt(world.requests[1])
        world.check(*world.run(world.requests, budget, padded=step % 2))
    assert len(world.requests) == 4
    assert world.inside > 0
    return world

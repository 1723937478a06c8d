"""A recorded step (proof/kernels/graph.py) gives, replayed, what the step itself gives: the same bytes in all caches,
the same bits of every answer, whatever its lengths, tables, headers and tokens are by then.

It is recorded as vLLM captures it, from requests that are padding, for each of its batch sizes: 1, 2, 4 and 8 tokens,
rounded up to whole requests of 1 + drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from proof.kernels.graph import Recording, record
from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.gpu import cuda
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.gpu.triton.transformed import tables
from vllm_kvq.kernels.paths import Wish, kernels_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Step, StepBatch
from vllm_kvq.kernels.torch.step import PlannedStep

HEADS, SHARE, WIDTH, N = 2, 2, 8, 32
CPU = torch.device("cpu")
# units are completed by the first, the third and no decode step; a request of one token; one that is longer than others
PROMPTS = (95, 1, 61, 130, 31, 64, 33, 66)


@dataclass
class Buffers:
    """What vLLM keeps for a batch size."""

    batch: StepBatch
    data: list[torch.Tensor]
    """Queries, keys, values."""
    out: torch.Tensor

    @property
    def all(self) -> list[torch.Tensor]:
        b = self.batch
        tables = [b.table, b.side_table, *([] if b.sink_table is None else [b.sink_table])]
        return [b.device_start, b.seq_lens, *tables, *self.data, self.out]


class World:
    """Requests whose prompts are in the caches, twice: for the step itself and for its recording."""

    def __init__(self, fmt: PageFormat, drafts: int, requests: int, step: type[GPUStep] = GPUStep) -> None:
        self.fmt, self.drafts, self.most = fmt, drafts, requests
        self.slots = SlotGeometry.of(fmt, HEADS, drafts)
        self.rng = torch.Generator().manual_seed(0)
        cuts = [WIDTH, self.slots.sidecar_blocks, self.slots.sink_blocks]
        blocks = 1 + requests * sum(cuts)
        ids = torch.arange(1, blocks, dtype=torch.int32).view(requests, -1)
        self.tables = [x.contiguous() for x in ids.split(cuts, 1)]
        elements = self.slots.page_bytes // fmt.geometry.dtype.itemsize
        pages = torch.zeros(blocks, HEADS, fmt.record_bytes, dtype=torch.uint8)
        side, sinks = (torch.zeros(blocks, elements, dtype=fmt.geometry.dtype) for _ in range(2))
        self.eager, self.recorded = (step(fmt, self.slots, drafts, 0.125, CPU) for _ in range(2))
        self.caches = [Caches(pages, side, sinks if fmt.S else None)]
        self.context = torch.zeros(requests, dtype=torch.int32)
        # prompts by the C++ kernels, which write the same bytes sooner
        self.run(
            list(PROMPTS[:requests]), PlannedStep(fmt, self.slots, drafts, 0.125, CPU, kernels_for(fmt, Wish("cpu")))
        )
        self.caches.append(Caches(pages.clone(), side.clone(), sinks.clone() if fmt.S else None))

    def new(self, tokens: int) -> list[torch.Tensor]:
        d, dtype = self.fmt.geometry.head_size, self.fmt.geometry.dtype
        heads = (HEADS * SHARE, HEADS, HEADS)
        return [torch.randn(tokens, h, d, generator=self.rng).to(dtype) for h in heads]

    def batch(self, counts: list[int]) -> StepBatch:
        start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
        n = len(counts)
        pages, side, sinks = (x[:n] for x in self.tables)
        seq = self.context[:n] + torch.tensor(counts, dtype=torch.int32)
        return StepBatch(start, start.clone(), seq, pages, side, sinks if self.fmt.S else None, max(counts))

    def run(self, counts: list[int], step: Step | None = None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The step itself."""
        data = self.new(sum(counts))
        out = torch.empty_like(data[0])
        (step or self.eager).run(self.batch(counts), self.caches[0], *data, out)
        self.context[: len(counts)] += torch.tensor(counts, dtype=torch.int32)
        return data, out

    def buffers(self, requests: int) -> Buffers:
        """As vLLM captures a graph: every request has all its tokens and is padding."""
        q = 1 + self.drafts
        start = torch.arange(0, (requests + 1) * q, q, dtype=torch.int32)
        tables = [torch.zeros(requests, x.shape[1], dtype=torch.int32) for x in self.tables]
        sinks = tables[2] if self.fmt.S else None
        seq = torch.full((requests,), q, dtype=torch.int32)
        data = self.new(requests * q)
        return Buffers(StepBatch(start, start.clone(), seq, *tables[:2], sinks, q), data, torch.empty_like(data[0]))

    def record(self, buffers: Buffers) -> Recording:
        caches, step = self.caches[1], self.recorded
        pools = [caches.pages, caches.sidecar, *([] if caches.sinks is None else [caches.sinks])]
        known = cuda.bind(self.fmt, CPU) if step.kernels is cuda.CUDA else None
        stay = [*buffers.all, *pools, step.faults, *([known.inner, known.outer] if known else [])]
        stay += tables(self.fmt, HEADS, CPU) or ()
        host = [buffers.batch.query_start, *([known.layout] if known else [])]
        return record(lambda: step.run(buffers.batch, caches, *buffers.data, buffers.out), stay, host)

    def check(self, buffers: Buffers, recording: Recording, counts: list[int]) -> None:
        """One step of len(counts) requests, by itself and by the recording; the rest of the batch is padding."""
        live, tokens = len(counts), sum(counts)
        real = self.batch(counts)
        data, want = self.run(counts)
        batch = buffers.batch
        batch.device_start.fill_(tokens)
        batch.device_start[: live + 1] = real.device_start
        batch.seq_lens.zero_()
        batch.seq_lens[:live] = real.seq_lens
        for mine, table in zip((batch.table, batch.side_table, batch.sink_table), self.tables, strict=True):
            if mine is not None:
                mine.zero_()
                mine[:live] = table[:live]
        for mine, new in zip(buffers.data, data, strict=True):
            mine.fill_(torch.nan)
            mine[:tokens] = new
        buffers.out.fill_(torch.nan)
        recording.replay()
        # a library multiplies calibrated formats' queries by a matrix, and rounds otherwise if padding makes more rows
        near = 1e-6 if self.fmt.calibrated else 0.0
        assert torch.allclose(buffers.out[:tokens], want, rtol=near, atol=near)
        assert (buffers.out[tokens:] == 0).all()
        self.same()

    def same(self) -> None:
        a, b = self.caches
        assert torch.equal(a.pages, b.pages)
        for x, y in ((a.sidecar, b.sidecar), (a.sinks, b.sinks)):
            assert x is None or y is None or torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        assert torch.equal(self.eager.faults, self.recorded.faults)


def bound(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> PageFormat:
    return calibrated(get_format(name).bind(Geometry(64, N, dtype), {"W": 32, **options}), HEADS)


def captured(size: int, queries: int) -> int:
    """Requests of the graph for that many tokens: vLLM's `CudaGraphManager` rounds up."""
    return -(-size // queries)


def wide(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.wide)


SQUAT, INNERQ = ("squat2", {}), ("innerq2", {"S": 8})
OTHERS = (
    ("kivi2", {"S": 0}),
    ("polar4", {}),
    ("polar3", {"S": 5}),
    ("qjl3", {}),
    ("squat4", {"dtype": torch.bfloat16}),
    ("kitty2", {}),
    ("klt3", {}),
)


@pytest.mark.parametrize(
    ("fmt", "drafts", "size"),
    [
        (SQUAT, 0, 4),
        (INNERQ, 2, 2),
        (("qjl3", {}), 0, 2),
        *(wide(f, drafts, size) for f in (SQUAT, INNERQ, *OTHERS) for drafts in (0, 2) for size in (1, 2, 4, 8)),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else None,
)
def test_a_replay_is_the_step(fmt: tuple[str, dict[str, Any]], drafts: int, size: int) -> None:
    name, options = fmt
    queries = 1 + drafts
    requests = captured(size, queries)
    world = World(bound(name, **options), drafts, requests)
    buffers = world.buffers(requests)
    recording = world.record(buffers)
    assert not recording.problems
    assert recording.launches == 6  # begin, pack, attend twice, merge, commit
    world.same()  # padding touches nothing
    world.check(buffers, recording, [queries] * requests)
    # some drafts are rejected, and a request has fewer tokens than the graph was made for
    world.context[:requests] -= torch.arange(requests, dtype=torch.int32) % queries
    world.check(buffers, recording, [queries, *[1 + i % queries for i in range(1, requests)]])
    if requests > 1:
        world.check(buffers, recording, [queries] * (requests // 2))
    world.check(buffers, recording, [queries] * requests)


class Shares(GPUStep):
    """With a layer that shares the caches, whose answer is compared."""

    def run(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int:
        caches = replace(caches, readers=1)
        super().run(batch, caches, query, key, value, torch.empty_like(output))
        self.share(batch, caches, query, output)
        return 0


def test_a_replay_serves_sharing_layers() -> None:
    world = World(bound("squat2"), 0, 2, Shares)
    buffers = world.buffers(2)
    recording = world.record(buffers)
    assert not recording.problems
    assert recording.launches == 9  # begin, pack, attend twice, merge, the last three again, commit
    world.check(buffers, recording, [1, 1])
    world.check(buffers, recording, [1])


class Peeks(GPUStep):
    def _pack(self, batch: StepBatch, *rest: Any) -> None:
        if int(batch.seq_lens.max()) > self.fmt.W:
            super()._pack(batch, *rest)


class Lists(GPUStep):
    def _commit(self, batch: StepBatch, *rest: Any) -> None:
        if max(batch.seq_lens.tolist()) > 0:
            super()._commit(batch, *rest)


class Counts(GPUStep):
    def _pack(self, batch: StepBatch, *rest: Any) -> None:
        if len(batch.seq_lens[batch.seq_lens > self.fmt.W]):
            super()._pack(batch, *rest)


class Keeps(GPUStep):
    """Its own plan, which the next batch size would replace by a larger one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plan = torch.zeros(8, 1, dtype=torch.int32)

    def _begin(self, *arguments: Any) -> torch.Tensor:
        return self.plan.copy_(super()._begin(*arguments))


class Sends(GPUStep):
    def _begin(self, batch: StepBatch, *rest: Any) -> torch.Tensor:
        return super()._begin(batch, *rest) + torch.tensor([0] * batch.requests, dtype=torch.int32)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (Peeks, "the host reads a tensor () of the device's: _local_scalar_dense"),
        (Lists, "the host reads a tensor (1,) of the device's: tolist"),
        (Counts, "the host reads a tensor (1,) of the device's: how many a mask takes"),
        (Keeps, "copy_ takes a tensor (8, 1) that may move"),
        (Sends, "a tensor (1,) of the host's is copied to the device"),
    ],
)
def test_what_no_graph_can_hold_is_named(step: type[GPUStep], problem: str) -> None:
    world = World(bound("squat2"), 0, 1, step)
    assert problem in world.record(world.buffers(1)).problems


class Decides(GPUStep):
    """By what the host was told in addition to the tensors: nothing is read, and a graph would repeat that decision."""

    told = False

    def _pack(self, batch: StepBatch, *rest: Any) -> None:
        if self.told:
            super()._pack(batch, *rest)


def test_a_decision_of_the_host_is_noticed() -> None:
    world = World(bound("squat2"), 0, 1, Decides)
    buffers = world.buffers(1)
    recording = world.record(buffers)
    assert not recording.problems
    world.eager = GPUStep(world.fmt, world.slots, 0, 0.125, CPU)
    with pytest.raises(AssertionError):
        world.check(buffers, recording, [1])

"""The GPU's step over simple traffic, compared with the reference cache; needs neither vLLM nor a test runner.

Two requests with prompts of different lengths, then decoding; `graph=True` replays one captured CUDA graph for every
decode step, and without a graph decoding runs where a host synchronisation is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from proof.kernels.exact import relative_error
from proof.oracle.reference.reference import ReferenceCache
from vllm_kvq.bench.pools import outlier_data
from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Prompts, StepBatch


@dataclass
class StepTraffic:
    fmt: PageFormat
    device: torch.device
    heads: int = 2
    share: int = 2
    width: int = 8
    """The maximum number of pages of a request."""
    prompts_by: Prompts | None = None
    """The kernels that attend plain tokens in prompts; None: the step's own."""
    worst: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        fmt, device, dtype = self.fmt, self.device, self.fmt.geometry.dtype
        self.slots = SlotGeometry.of(fmt, self.heads, 0)
        self.scale = fmt.geometry.head_size**-0.5
        self.step = GPUStep(fmt, self.slots, 0, self.scale, device, self.prompts_by)
        self.each = self.width + self.slots.sidecar_blocks + self.slots.sink_blocks
        blocks = 1 + 2 * self.each
        elements = self.slots.page_bytes // dtype.itemsize
        pages = torch.zeros(blocks, self.heads, fmt.record_bytes, dtype=torch.uint8, device=device)
        pools = [torch.zeros(blocks, elements, dtype=dtype, device=device) for _ in range(2)]
        self.caches = Caches(pages, pools[0], pools[1] if fmt.S else None)
        ids = torch.arange(1, blocks, dtype=torch.int32, device=device).view(2, -1)
        cuts = [self.width, self.slots.sidecar_blocks, self.slots.sink_blocks]
        self.tables = [x.contiguous() for x in ids.split(cuts, 1)]
        self.references = [ReferenceCache(fmt, self.heads) for _ in range(2)]
        self.rng = torch.Generator().manual_seed(0)

    def data(self, lengths: tuple[int, ...]) -> list[torch.Tensor]:
        d = self.fmt.geometry.head_size
        made = [outlier_data(n, self.heads, d, 7 * i + len(r.key)) for i, (n, r) in enumerate(self._pairs(lengths))]
        key, value = (torch.cat([m[j].transpose(0, 1) for m in made]) for j in range(2))
        query = torch.randn(sum(lengths), self.heads * self.share, d, generator=self.rng)
        return [x.to(self.fmt.geometry.dtype) for x in (query, key, value)]

    def _pairs(self, lengths: tuple[int, ...]) -> list[tuple[int, ReferenceCache]]:
        return list(zip(lengths, self.references, strict=True))

    def batch(self, lengths: tuple[int, ...]) -> StepBatch:
        start = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
        seq = torch.tensor([len(r.key) + n for n, r in self._pairs(lengths)], dtype=torch.int32)
        pages, side, sinks = self.tables
        on_device, sinks = start.to(self.device), sinks if self.fmt.S else None
        return StepBatch(start, on_device, seq.to(self.device), pages, side, sinks, max(lengths))

    def judge(self, got: torch.Tensor, lengths: tuple[int, ...], data: list[torch.Tensor]) -> None:
        at = 0
        for n, reference in self._pairs(lengths):
            query, key, value = (x[at : at + n] for x in data)
            want = reference.step(query, key, value, self.scale)
            self.worst = max(self.worst, relative_error(got[at : at + n].float().cpu(), want.double()))
            at += n

    def prompts(self, lengths: tuple[int, ...]) -> None:
        data = self.data(lengths)
        out = torch.empty_like(data[0], device=self.device)
        self._run(self.batch(lengths), [x.to(self.device) for x in data], out)
        self.judge(out, lengths, data)

    def decode(self, steps: int, graph: bool = False) -> None:
        one = (1, 1)
        data = self.data(one)
        fixed, batch = [x.to(self.device) for x in data], self.batch(one)
        out = torch.empty_like(fixed[0])
        captured = None
        for _ in range(steps):
            data = self.data(one)
            batch.seq_lens.copy_(self.batch(one).seq_lens)
            for x, new in zip(fixed, data, strict=True):
                x.copy_(new)
            if graph and captured is None:
                captured = self._capture(batch, fixed, out)
            if captured is not None:
                captured.replay()
            else:
                self._strictly(batch, fixed, out)
            self.judge(out, one, data)

    def _strictly(self, batch: StepBatch, fixed: list[torch.Tensor], out: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._run(batch, fixed, out)
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    def _capture(self, batch: StepBatch, fixed: list[torch.Tensor], out: torch.Tensor) -> torch.cuda.CUDAGraph:
        # kernels are compiled by a step of padded requests, which touches no cache
        self._run(replace(batch, device_start=torch.zeros_like(batch.device_start)), fixed, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(batch, fixed, out)
        return graph

    def _run(self, batch: StepBatch, data: list[torch.Tensor], out: torch.Tensor) -> None:
        query, key, value = data
        self.step.run(batch, self.caches, query, key, value, out)

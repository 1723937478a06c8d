"""A prompt in two chunks and a few decode steps on one path, each compared with the reference cache.

Codes may differ where two correct sums round to different sides, and later answers with them. So what a step packs is
compared separately, and then given to the reference: answers are compared over the pages that the path has written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from proof.kernels.exact import relative_error
from proof.oracle.reference.reference import ReferenceCache, Unit
from vllm_kvq.bench.pools import outlier_data
from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.constants import Moments
from vllm_kvq.formats.parts.fields import round_up
from vllm_kvq.kernels.paths import Path, step_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch

HEADS, SHARE = 2, 2
DECODES = 2
ONE_SIDED = 5.0
"""The mean of some channels: there InnerQ's groups are asymmetric."""
FITTED = 4
"""Constants are fitted to at least this many tokens per channel; the trace uses the first ones."""
SAME = 2.0**-9
"""Tolerance relative to a field's largest number: values read back may differ by the rounding of parameters."""


@dataclass
class Trace:
    """The bytes and answers of one path for a format."""

    fmt: PageFormat
    path: Path
    seed: int = 0
    heads: int = HEADS
    share: int = SHARE
    answers: float = field(default=0.0, init=False)
    """The largest relative error of a step's answers over its own pages."""
    moved: float = field(default=0.0, init=False)
    """The largest share of a half's packed elements that are read back differently from the reference's."""
    worse: float = field(default=0.0, init=False)
    """By how much the relative error of what was packed exceeds the reference's, at most."""
    finite: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        fmt = self.fmt
        d, dtype = fmt.geometry.head_size, fmt.geometry.dtype
        self.slots, self.scale = SlotGeometry.of(fmt, self.heads, 0), d**-0.5
        first, prompt = fmt.N + 5, round_up(fmt.N + max(fmt.W, fmt.S) + 2 * fmt.unit, fmt.unit) - 1
        # the first decode step completes a unit
        self.chunks = (first, prompt - first, *[1] * DECODES)
        self.tokens = sum(self.chunks)
        cuts = [-(-self.tokens // fmt.N), self.slots.sidecar_blocks, self.slots.sink_blocks]
        ids = torch.arange(1, 1 + sum(cuts), dtype=torch.int32)[None]
        self.tables = [x.contiguous() for x in ids.split(cuts, 1)]
        blocks, elements = 1 + sum(cuts), self.slots.page_bytes // dtype.itemsize
        pages = torch.zeros(blocks, self.heads, fmt.record_bytes, dtype=torch.uint8)
        side, sinks = (torch.zeros(blocks, elements, dtype=dtype) for _ in range(2))
        self.caches = Caches(pages, side, sinks if fmt.S else None)
        tokens = max(self.tokens, FITTED * d) if fmt.calibrated else self.tokens
        key, value = outlier_data(tokens, self.heads, d, self.seed)
        key[..., -32:] += ONE_SIDED
        value[..., :32] += ONE_SIDED
        key, value = (x.transpose(0, 1).to(dtype) for x in (key, value))
        rng = torch.Generator().manual_seed(self.seed + 1)
        # queries of a low rank and noise, so that SQuat has a subspace to find
        mixture = torch.randn(tokens, self.heads * self.share, 4, generator=rng)
        noise = torch.randn(tokens, self.heads * self.share, d, generator=rng)
        query = (mixture @ torch.randn(4, d, generator=rng) + 0.3 * noise).to(dtype)
        self.data = tuple(x[: self.tokens] for x in (query, key, value))
        if fmt.calibrated:  # constants of other keys would make scores larger than in any model
            self.fmt = fmt = fmt.with_constants(fmt.fitted_to(Moments.of(query.float(), key.float())))
        self.step = step_for(self.path, fmt, self.slots, 0, self.scale, torch.device("cpu"))

    def run(self) -> None:
        reference, at = ReferenceCache(self.fmt, self.heads), 0
        for new in self.chunks:
            query, key, value = (x[at : at + new] for x in self.data)
            output = torch.full_like(query, torch.nan)
            start = torch.tensor([0, new], dtype=torch.int32)
            seq = torch.tensor([at + new], dtype=torch.int32)
            pages, side, sinks = self.tables
            batch = StepBatch(start, start, seq, pages, side, sinks if self.fmt.S else None, new)
            self.step.run(batch, self.caches, query, key, value, output)
            known = set(reference.packed)
            want = reference.step(query, key, value, self.scale)
            self.finite &= bool(output.isfinite().all())
            self.answers = max(self.answers, relative_error(output.float(), want.double()))
            for unit in sorted(set(reference.packed) - known):
                self._packed(reference, unit)
            at += new

    def _packed(self, reference: ReferenceCache, unit: int) -> None:
        """Judge a unit that was packed in this step, and let the reference read it from now on."""
        fmt, p = self.fmt, self.fmt.unit
        page, first = divmod(unit * p, fmt.N)
        fields = fmt.read(self.caches.pages, self.tables[0][0, page : page + 1].long())
        at, d = slice(first, first + p), fmt.geometry.head_size
        key, value = (x[:, at, :d].transpose(0, 1) for x in fmt.unpack(fields))
        originals = (reference.key[unit * p :][:p], reference.value[unit * p :][:p])
        for got, want, x in zip((key, value), reference.packed[unit], originals, strict=True):
            self.finite &= bool(got.isfinite().all()) and got.shape == want.shape
            differs = (got - want).abs() > SAME * want.abs().max()
            self.moved = max(self.moved, float(differs.float().mean()))
            error, least = (relative_error(y, x.double()) for y in (got, want))
            self.worse = max(self.worse, error - least)
        packed: Unit = key, value
        reference.packed[unit] = packed

"""Rising scores and a maximum in the first, a middle or the last slab, page and split, in Triton's kernels."""

from __future__ import annotations

import pytest
import torch
from rising import decode_error, exact, rising, stands_out, unpacked

from proof.kernels.exact import relative_error
from proof.tables import attended
from vllm_kvq.bench.pools import calibrated, pages_of
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.gpu.paged import merge_parts
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.gpu.triton.kernels import TRITON

D, N, PAGES = 64, 64, 3
PEAKS = (3, 100, N * PAGES - 1)
FORMATS = [name for name in attended.by_triton() if get_format(name).keys.name != "kivi"]
"""KIVI's kernels are SQuat's (test_compile.py)."""
EVERY_RUN = ("squat2", "innerq2", "polar4")
"""A few kinds of kernels: Triton's interpreter is slow."""


def check(name: str, splits: int, queries: int = 1, share: int = 2) -> None:
    """One request for each peak."""
    fmt = calibrated(get_format(name).bind(Geometry(D, N)), 1)
    pools, want = [], []
    for peak in PEAKS:
        query, key, value = rising(1, N * PAGES, peak, share, queries, D)
        pages = pages_of(fmt, key, value)
        read = unpacked(fmt, pages, torch.arange(1, PAGES + 1))
        assert stands_out(query, read[0], peak, D**-0.5)
        pools.append(pages[1:])
        want.append(exact(query, *read, D**-0.5))
    table = torch.arange(3 * PAGES, dtype=torch.int32).view(3, PAGES)
    low, high = torch.zeros(3, dtype=torch.int32), torch.full((3,), N * PAGES, dtype=torch.int32)
    queries_ = query[None].expand(3, -1, -1, -1)  # the direction is the same
    out, lse = TRITON.attend_table(fmt, queries_, torch.cat(pools), table, low, high, D**-0.5, splits)
    for i, (out64, lse64) in enumerate(want):
        assert relative_error(out[i], out64) < 2e-3, f"peak {PEAKS[i]}"
        assert (lse[i] - lse64).abs().max() < 2e-2


@pytest.mark.parametrize("name", [n if n in EVERY_RUN else pytest.param(n, marks=pytest.mark.wide) for n in FORMATS])
def test_packed_pages(name: str) -> None:
    check(name, splits=1)


def test_splits() -> None:
    check("squat2", splits=2)


def test_a_chunk() -> None:
    check("squat2", splits=1, queries=3, share=4)


def test_a_decode_step() -> None:
    """Sinks, pages, ring and the new token, and their merge."""
    assert decode_error("squat2", 64, GPUStep) < 2e-3


def test_merge() -> None:
    """Each part in turn is 20 nats above the others."""
    rng = torch.Generator().manual_seed(0)
    out, lse = torch.randn(4, 5, 2, D, generator=rng), torch.arange(8.0).view(4, 1, 2).repeat(1, 5, 1)
    for part in range(4):
        lse[part, part] += 25
    got, total = merge_parts(out, lse)
    want = (lse.double().softmax(0)[..., None] * out).sum(0)
    assert relative_error(got, want) < 1e-6
    torch.testing.assert_close(total, lse.logsumexp(0), rtol=1e-6, atol=1e-5)

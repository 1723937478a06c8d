"""Rising scores and a maximum in the first, a middle or the last slab, warp and split, in the CUDA kernels."""

from __future__ import annotations

import pytest
import torch
from rising import decode_error, exact, rising, stands_out, unpacked

from proof.kernels.exact import relative_error
from vllm_kvq.bench.pools import pages_of
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.gpu.cuda import CUDA
from vllm_kvq.kernels.gpu.step import GPUStep

D, N, PAGES = 64, 64, 6
PEAKS = (3, 100, 230, N * PAGES - 1)


@pytest.mark.parametrize(("splits", "queries", "share"), [(1, 1, 4), (2, 1, 4), (1, 3, 4)])
def test_packed_pages(splits: int, queries: int, share: int) -> None:
    """Four warps take three slabs each in turn: the last slab of a warp, and the merge of the warps."""
    fmt = get_format("qjl3").bind(Geometry(D, N))
    for peak in PEAKS:
        query, key, value = rising(1, N * PAGES, peak, share, queries, D)
        pages = pages_of(fmt, key, value)
        key, value = unpacked(fmt, pages, torch.arange(1, PAGES + 1))
        assert stands_out(query, key, peak, D**-0.5)
        want, want_lse = exact(query, key, value, D**-0.5)
        table = torch.arange(1, PAGES + 1, dtype=torch.int32)[None]
        low, high = torch.tensor([0]), torch.tensor([N * PAGES])
        out, lse = CUDA.attend_table(fmt, query[None], pages, table, low, high, D**-0.5, splits)
        assert relative_error(out[0], want) < 2e-3, f"peak {peak}"
        assert (lse[0] - want_lse).abs().max() < 2e-2


def test_a_decode_step() -> None:
    assert decode_error("qjl3", D, GPUStep) < 1e-2

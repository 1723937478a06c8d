"""QJL's CUDA kernels on a real device: as a pytest module, or `python3 tests/gpu/test_gpu_qjl.py [--quick]`.

`--quick` is the part that compute-sanitizer can go through in a minute.
"""

from __future__ import annotations

import itertools
import sys

import torch
from parallel import DEVICE, failed

from proof.kernels.exact import exact_attention, relative_error
from proof.kernels.packing import pack_like_a_step
from vllm_kvq.bench.pools import outlier_data, random_pages
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.gpu.cuda import CUDA

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
except ImportError:
    pass

BOUND = 2e-3
QUICK = False


def _case(d: int, share: int, n: int, dtype: torch.dtype, q: int = 1, splits: int | None = None) -> None:
    fmt = get_format("qjl3").bind(Geometry(d, n))
    pages = random_pages(fmt, 9, 2)
    table = torch.tensor([[3, 1, 2, 7, 9], [4, 0, -1, 999, 0], [5, 6, 8, 9, 1], [0, 0, 0, 0, 0]], dtype=torch.int32)
    low, high = torch.tensor([5, 0, 0, 0]), torch.tensor([4 * n + 17, 19, 5 * n, 0])
    query = torch.randn(4, q, 2 * share, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    want, want_lse = exact_attention(fmt, query, pages, table, low, high, d**-0.5)
    on = [x.to(DEVICE) for x in (query, pages, table, low, high)]
    for _ in range(1 if QUICK else 3):  # a race rarely shows at once
        out, lse = CUDA.attend_table(fmt, *on, d**-0.5, splits)
        error = relative_error(out.cpu(), want)
        where = f"d={d} share={share} N={n} {dtype} q={q} splits={splits}"
        assert error < BOUND, f"{where}: relative error {error:.2e}"
        empty = want_lse == -torch.inf
        assert torch.isneginf(lse.cpu()[empty]).all(), where
        assert (lse.cpu().double() - want_lse)[~empty].abs().max() < 8e-3, where


def test_head_sizes_and_ratios() -> None:
    dtypes = itertools.cycle((torch.float16, torch.bfloat16, torch.float32))
    sizes = itertools.cycle((32, 64, 128))
    for d, share in itertools.product((64, 128, 256), (4,) if QUICK else (1, 4, 8, 12)):
        _case(d, share, next(sizes), next(dtypes))


def test_chunks_and_splits() -> None:
    for q, splits in ((5, 2),) if QUICK else itertools.product((1, 5, 33), (None, 1, 16)):
        _case(128, 4, 64, torch.bfloat16, q, splits)


def test_graph_replay_follows_the_device() -> None:
    """Lengths and tables that change after the capture take effect: nothing was read on the host."""
    fmt = get_format("qjl3").bind(Geometry(128, 64))
    pages = random_pages(fmt, 4, 2)
    table, low, high = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.tensor([0]), torch.tensor([40])
    query = torch.randn(1, 1, 8, 128)
    on = [x.cuda() for x in (query, pages, table, low, high)]
    CUDA.attend_table(fmt, *on, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = CUDA.attend_table(fmt, *on, 0.1)
    table, high = torch.tensor([[4, 2, 1, 3]], dtype=torch.int32), torch.tensor([201])
    on[2].copy_(table)
    on[4].copy_(high)
    graph.replay()
    want, _ = exact_attention(fmt, query, pages, table, low, high, 0.1)
    assert relative_error(out.cpu(), want) < BOUND


def test_pack() -> None:
    for d, dtype in itertools.product((128,) if QUICK else (64, 128, 256), (torch.bfloat16, torch.float32)):
        fmt = get_format("qjl3").bind(Geometry(d, 64, dtype))
        key, value = (x.transpose(0, 1).to(dtype).contiguous() for x in outlier_data(128, 2, d, 0))
        got, replaced = pack_like_a_step(CUDA, fmt, key, value, 40, None, DEVICE)
        assert not replaced
        rows = torch.arange(32, 128).view(3, 32)
        page, slab = 1 + rows[:, 0] // 64, rows[:, 0] % 64 // 32
        want = torch.zeros_like(got)
        by_head = (fmt.widen(x[rows])[0].transpose(1, 2).flatten(0, 1) for x in (key, value))
        fmt.write(want, page, slab, fmt.pack(*by_head, None))
        a, b = (fmt.read(x, page) for x in (want, got))
        for name in ("ko_index", "v_codes", "v_scale", "v_zero"):
            assert torch.equal(a[name], b[name]), f"{name} d={d} {dtype}"
        wrong = sum(((a["k_bits"] ^ b["k_bits"]) >> i & 1).sum() for i in range(8))
        assert wrong <= 1e-3 * 8 * a["k_bits"].numel(), f"{int(wrong)} sign bits d={d} {dtype}"


CASES = [(test_head_sizes_and_ratios, ()), (test_chunks_and_splits, ()), (test_pack, ())]

if __name__ == "__main__":
    QUICK = "--quick" in sys.argv or DEVICE == "cpu"
    if "--dry-run" in sys.argv:
        CASES = CASES[1:2]
    elif not QUICK:
        CASES.append((test_graph_replay_follows_the_device, ()))
    # in this process, because that is the one compute-sanitizer watches
    sys.exit(max(failed(case) for case in CASES))

"""The kernels on a real device: as a pytest module, or `python3 tests/gpu/test_gpu_decode.py` where there is no pytest.

No GPU has run this yet.
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback

import torch

from vllm_kvq.eval.packed_attention import exact_attention, random_pages, relative_error
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.triton import TRITON as kernels

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
except ImportError:
    pass

BOUND = 2e-3
FORMATS = ("squat2", "squat4", "kivi2", "kivi4", "innerq2", "polar4", "polar3")


def _case(name: str, d: int, share: int, n: int, dtype: torch.dtype, q: int = 1, splits: int | None = None) -> None:
    fmt = get_format(name).bind(Geometry(d, n))
    pages = random_pages(fmt, 9, 2)
    table = torch.tensor([[3, 1, 2, 7, 9], [4, 0, -1, 999, 0], [5, 6, 8, 9, 1], [0, 0, 0, 0, 0]], dtype=torch.int32)
    low, high = torch.tensor([5, 0, 0, 0]), torch.tensor([4 * n + 17, 19, 5 * n, 0])
    query = torch.randn(4, q, 2 * share, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    want, want_lse = exact_attention(fmt, query, pages, table, low, high, d**-0.5)
    on = [x.cuda() for x in (query, pages, table, low, high)]
    out, lse = kernels.attend_table(fmt, *on, d**-0.5, splits)
    error = relative_error(out.cpu(), want)
    where = f"{name} d={d} share={share} N={n} {dtype} q={q} splits={splits}"
    assert error < BOUND, f"{where}: relative error {error:.2e}"
    empty = want_lse == -torch.inf
    assert torch.isneginf(lse.cpu()[empty]).all(), where
    assert (lse.cpu().double() - want_lse)[~empty].abs().max() < 8e-3, where


def test_formats_and_head_sizes() -> None:
    rest = itertools.cycle(itertools.product((1, 4, 8), (32, 64, 128), (torch.float16, torch.bfloat16, torch.float32)))
    for name, d in itertools.product(FORMATS, (64, 96, 128, 256)):
        _case(name, d, *next(rest))


def test_chunks_and_splits() -> None:
    for name, q, splits in itertools.product(("squat2", "innerq2", "polar4"), (1, 5, 33), (None, 1, 16)):
        _case(name, 128, 4, 64, torch.bfloat16, q, splits)


def test_graph_replay_follows_the_device() -> None:
    """Lengths and tables changed after the capture are what counts: nothing was read on the host."""
    fmt = get_format("squat2").bind(Geometry(128, 64))
    pages = random_pages(fmt, 4, 2)
    table, low, high = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.tensor([0]), torch.tensor([40])
    query = torch.randn(1, 1, 8, 128)
    on = [x.cuda() for x in (query, pages, table, low, high)]
    kernels.attend_table(fmt, *on, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernels.attend_table(fmt, *on, 0.1)
    table, high = torch.tensor([[4, 2, 1, 3]], dtype=torch.int32), torch.tensor([201])
    on[2].copy_(table)
    on[4].copy_(high)
    graph.replay()
    want, _ = exact_attention(fmt, query, pages, table, low, high, 0.1)
    assert relative_error(out.cpu(), want) < BOUND


def main() -> int:
    failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        start = time.monotonic()
        try:
            test()
            print(f"passed {name} in {time.monotonic() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The Triton kernels on a real device: as a pytest module, or `python3 tests/gpu/test_gpu_attend.py [--dry-run]`."""

from __future__ import annotations

import itertools

import torch
from parallel import DEVICE, main

from proof.kernels.exact import exact_attention, relative_error
from vllm_kvq.bench.gpu.decode import formats
from vllm_kvq.bench.pools import calibrated, random_pages
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.gpu.triton.kernels import TRITON

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
except ImportError:
    pass

BOUND = 2e-3
FORMATS = tuple(name for name in formats() if name != "qjl3")


def decode(
    name: str,
    d: int,
    share: int,
    n: int,
    dtype: torch.dtype,
    q: int = 1,
    splits: int | None = None,
) -> None:
    fmt = calibrated(get_format(name).bind(Geometry(d, n)), 2)
    pages = random_pages(fmt, 9, 2)
    table = torch.tensor([[3, 1, 2, 7, 9], [4, 0, -1, 999, 0], [5, 6, 8, 9, 1], [0, 0, 0, 0, 0]], dtype=torch.int32)
    low, high = torch.tensor([5, 0, 0, 0]), torch.tensor([4 * n + 17, 19, 5 * n, 0])
    query = torch.randn(4, q, 2 * share, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    want, want_lse = exact_attention(fmt, query, pages, table, low, high, d**-0.5)
    on = [x.to(DEVICE) for x in (query, pages, table, low, high)]
    out, lse = TRITON.attend_table(fmt, *on, d**-0.5, splits)
    error = relative_error(out.cpu(), want)
    assert error < BOUND, f"relative error {error:.2e}"
    empty = want_lse == -torch.inf
    assert torch.isneginf(lse.cpu()[empty]).all()
    assert (lse.cpu().double() - want_lse)[~empty].abs().max() < 8e-3


def graph() -> None:
    """Lengths and tables that change after the capture take effect: nothing was read on the host."""
    fmt = get_format("squat2").bind(Geometry(128, 64))
    pages = random_pages(fmt, 4, 2)
    table, low, high = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.tensor([0]), torch.tensor([40])
    query = torch.randn(1, 1, 8, 128)
    on = [x.cuda() for x in (query, pages, table, low, high)]
    TRITON.attend_table(fmt, *on, 0.1)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out, _ = TRITON.attend_table(fmt, *on, 0.1)
    table, high = torch.tensor([[4, 2, 1, 3]], dtype=torch.int32), torch.tensor([201])
    on[2].copy_(table)
    on[4].copy_(high)
    captured.replay()
    want, _ = exact_attention(fmt, query, pages, table, low, high, 0.1)
    assert relative_error(out.cpu(), want) < BOUND


_REST = itertools.cycle(itertools.product((1, 4, 8), (32, 64, 128), (torch.float16, torch.bfloat16, torch.float32)))
HEADS = [(decode, (name, d, *next(_REST))) for name, d in itertools.product(FORMATS, (64, 96, 128, 256))]
KINDS = ("squat2", "innerq2", "polar4", "klt3")
"""One format of each kind of Triton kernel: HEADS has all formats, and time on a GPU is short."""
CHUNKS = [
    (decode, (name, 128, 4, 64, torch.bfloat16, q, splits))
    for name, q, splits in itertools.product(KINDS, (1, 5, 33), (None, 1, 16))
]


def test_formats_and_head_sizes() -> None:
    for case, arguments in HEADS:
        case(*arguments)


def test_chunks_and_splits() -> None:
    for case, arguments in CHUNKS:
        case(*arguments)


def test_graph_replay_follows_the_device() -> None:
    graph()


if __name__ == "__main__":
    main([*HEADS, *CHUNKS, *([(graph, ())] if DEVICE == "cuda" else [])])

"""Attention over full-precision tokens in C++, against the PyTorch kernel."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.lists import TokenList

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("isa"),
]


def inputs(n: int, q: int, t: int, heads: int, gqa: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(n + 10 * q + 100 * t + d)
    query = torch.randn(n, q, heads * gqa, d, generator=rng).to(dtype)
    key, value = (torch.randn(n, t, heads, d, generator=rng).to(dtype) for _ in range(2))
    seen = torch.rand(n, q, t, generator=rng) < 0.7
    seen[-1, -1] = False
    return query, key, value, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "q", "t", "heads", "gqa", "d"),
    [
        (2, 1, 1, 1, 1, 64),
        (3, 1, 130, 2, 4, 128),
        (2, 5, 32, 2, 7, 80),
        (1, 37, 61, 1, 8, 256),
        (2, 1, 61, 2, 7, 256),
        (2, 70, 100, 1, 1, 64),
        (1, 1, 61, 1, 4, 512),
        (1, 37, 61, 1, 4, 512),
    ],
)
def test_the_same_as_pytorch(n: int, q: int, t: int, heads: int, gqa: int, d: int, dtype: torch.dtype) -> None:
    query, key, value, seen = inputs(n, q, t, heads, gqa, d, dtype)
    got, want = (f(query, key, value, seen, d**-0.5) for f in (cpu.attend_raw, attend.attend_raw))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("q", [1, 37])
def test_a_soft_cap(q: int, dtype: torch.dtype) -> None:
    """Against float64; scores are as large as the cap."""
    query, key, value, seen = inputs(2, q, 61, 2, 4, 64, dtype)
    seen[-1, -1] = True
    k, v = (x.double().repeat_interleave(4, 2) for x in (key, value))
    for cap in (2.0, 50.0):
        scores = torch.einsum("nqhd,nthd->nhqt", query.double(), k) * (cap / 8)
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~seen[:, None], -math.inf)
        want = torch.einsum("nhqt,nthd->nqhd", scores.softmax(-1), v)
        for kernels in (cpu, attend):
            got, lse = kernels.attend_raw(query, key, value, seen, cap / 8, cap)
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse.double(), scores.logsumexp(-1).transpose(1, 2), rtol=1e-4, atol=1e-4)
            # the control
            without = kernels.attend_raw(query, key, value, seen, cap / 8)[0]
            assert (without - want).norm() > 0.1 * want.norm()


@pytest.mark.parametrize("gqa", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gathered_from_two_pools_and_merged(dtype: torch.dtype, gqa: int) -> None:
    n, q, t, heads, d = 3, 2, 40, 2, 80
    query, key, value, seen = inputs(n, q, t, heads, gqa, d, dtype)
    # both halves of a token side by side, in blocks of 16 and of 3 tokens that are further apart than they are long
    pools = []
    for slots in (16, 3):
        pool = torch.full((20, slots * heads * 2 * d + 64), math.nan).to(dtype)
        pools.append(pool.as_strided((20, slots, heads, 2 * d), (pool.stride(0), heads * 2 * d, 2 * d, 1)))
    rows = torch.randperm(380)[: n * t].view(n, t)
    for at, k, v in zip(rows.flatten(), key.flatten(0, 1), value.flatten(0, 1), strict=True):
        slots, i = (16, int(at)) if at < 320 else (3, int(at) - 320)
        pools[slots == 3][i // slots, i % slots] = torch.cat([k, v], dim=-1)
    rows[0, :5] = -1
    rows[1, 7] = min(set(range(320)) - set(rows.flatten().tolist()))
    seen[0, :, :5] = False  # absent
    seen[1, :, 7] = False  # present, but NaN and seen by nobody
    rng = torch.Generator().manual_seed(7)
    parts = [
        (torch.randn(n, q, heads * gqa, d, generator=rng), 4 * torch.randn(n, q, heads * gqa, generator=rng))
        for _ in range(2)
    ]
    parts[0][1][0] = -math.inf
    order = torch.randperm(9)[: n * q].view(n, q)
    held = TokenList(*((p[..., :d], p[..., d:]) for p in pools), rows, seen)
    for count in range(3):
        output = torch.zeros(9, heads * gqa, 2 * d, dtype=dtype)[..., :d]
        want = attend.merge([attend.attend_raw(query, key, value, seen, d**-0.5), *parts[:count]])
        cpu.attend_into(output, order, query, held, d**-0.5, parts[:count])
        tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(output[order].float(), want, rtol=tolerance, atol=tolerance / 10)
        same = torch.zeros_like(output)
        attend.attend_into(same, order, query, held, d**-0.5, parts[:count])
        torch.testing.assert_close(output.float(), same.float(), rtol=tolerance, atol=tolerance / 10)


def test_rows_beyond_the_pool() -> None:
    query, key, value, seen = inputs(1, 1, 4, 1, 1, 64, torch.float32)
    pool, none, output = (key, value), (key[:0], value[:0]), torch.zeros(1, 1, 64)
    here = torch.zeros(1, 1, dtype=torch.int64)
    for rows in ([0, 1, 2, 4], [1 << 50, 0, 0, 0]):
        with pytest.raises(IndexError):
            cpu.attend_into(output, here, query, TokenList(pool, none, torch.tensor([rows]), seen), 1.0, [])
    held = TokenList(pool, none, torch.tensor([[0, 1, 2, 3]]), seen)
    with pytest.raises(IndexError):
        cpu.attend_into(output, here + 1, query, held, 1.0, [])


def test_nothing_to_attend() -> None:
    query, key, value, _ = inputs(2, 1, 1, 1, 2, 64, torch.float32)
    out, lse = cpu.attend_raw(query, key[:, :0], value[:, :0], torch.zeros(2, 1, 0, dtype=torch.bool), 1.0)
    assert not out.any()
    assert torch.isneginf(lse).all()

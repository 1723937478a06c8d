"""Attention over full-precision tokens in C++, against the PyTorch kernel."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_kvq.kernels import attend, cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler")


@pytest.fixture(params=cpu.ISAS, autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    level = cpu.ISAS.index(request.param)
    if level > int(cpu.library().best_isa()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(cpu, "isa", lambda: level)
    return request.param


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
        (2, 70, 100, 1, 1, 64),
    ],
)
def test_the_same_as_pytorch(n: int, q: int, t: int, heads: int, gqa: int, d: int, dtype: torch.dtype) -> None:
    query, key, value, seen = inputs(n, q, t, heads, gqa, d, dtype)
    got, want = (f(query, key, value, seen, d**-0.5) for f in (cpu.attend_raw, attend.attend_raw))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gathered_from_a_strided_pool() -> None:
    n, t, heads, d = 3, 40, 2, 80
    query, key, value, seen = inputs(n, 2, t, heads, 4, d, torch.bfloat16)
    # both halves of a token side by side, in blocks of 16 tokens that are further apart than they are long
    pool = torch.full((20, 16 * heads * 2 * d + 64), math.nan, dtype=torch.bfloat16)
    strides = (pool.stride(0), heads * 2 * d, 2 * d, 1)
    store = pool.as_strided((20, 16, heads, 2 * d), strides)
    rows = torch.randperm(320)[: n * t].view(n, t)
    store[rows // 16, rows % 16] = torch.cat([key, value], dim=-1)
    rows[0, :5] = -1
    rows[1, 7] = min(set(range(320)) - set(rows.flatten().tolist()))
    seen[0, :, :5] = False  # absent
    seen[1, :, 7] = False  # present, but NaN and seen by nobody
    got = cpu.attend_rows(query, store[..., :d], store[..., d:], rows, seen, d**-0.5)
    torch.testing.assert_close(got, attend.attend_raw(query, key, value, seen, d**-0.5), rtol=1e-4, atol=1e-5)


def test_rows_beyond_the_pool() -> None:
    query, key, value, seen = inputs(1, 1, 4, 1, 1, 64, torch.float32)
    for rows in ([0, 1, 2, 4], [1 << 50, 0, 0, 0]):
        with pytest.raises(IndexError):
            cpu.attend_rows(query, key, value, torch.tensor([rows]), seen, 1.0)


def test_nothing_to_attend() -> None:
    query, key, value, _ = inputs(2, 1, 1, 1, 2, 64, torch.float32)
    out, lse = cpu.attend_raw(query, key[:, :0], value[:, :0], torch.zeros(2, 1, 0, dtype=torch.bool), 1.0)
    assert not out.any()
    assert torch.isneginf(lse).all()

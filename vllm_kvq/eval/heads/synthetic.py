"""Synthetic queries, keys and values that look like attention's: the data of the error table and of its
tests.

Keys: channels of unequal scale, a low-rank part that tokens share, and d / 16 outlier channels with a large
mean and a wider spread (KIVI's and QJL's observation). Queries: mostly in a low-rank subspace (SQuat's
observation) that overlaps the keys'. RoPE is applied to both on demand; it turns the outliers' means into
circles.

NumPy's legacy generator is frozen, so the same seed gives the same data everywhere.
"""

from __future__ import annotations

import numpy as np

import vllm_kvq.late_torch as torch
from vllm_kvq.formats.parts.rope import Rope

RANK = 4
OUTLIERS_PER_HEAD = 16
"""One in this many channels is an outlier channel."""


def rotate(x: torch.Tensor) -> torch.Tensor:
    """RoPE of rotate-half models on (tokens, heads, d), positions from 0."""
    return Rope.plain(x.shape[-1], len(x)).apply(x, torch.arange(len(x))[:, None])


def attention_data(
    head_size: int, tokens: int = 256, heads: int = 2, group: int = 4, rope: bool = False, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 (queries (tokens, heads * group, d), keys, values (tokens, heads, d))."""
    rng = np.random.RandomState(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    scale, mean = np.exp(0.3 * normal(heads, head_size)), np.zeros((heads, head_size))
    for h in range(heads):
        outlier = rng.permutation(head_size)[: head_size // OUTLIERS_PER_HEAD]
        scale[h, outlier] = rng.uniform(0.8, 2.4, len(outlier))
        mean[h, outlier] = rng.uniform(4, 12, len(outlier)) * rng.choice([-1.0, 1.0], len(outlier))
    own = normal(heads, RANK, head_size)
    shared = 0.5 * own + 0.75**0.5 * normal(heads, RANK, head_size)
    low = np.einsum("thr,hrd->thd", normal(tokens, heads, RANK), own) / RANK**0.5
    key = (normal(tokens, heads, head_size) + 0.7 * low) * scale + mean
    steer = np.einsum("thgr,hrd->thgd", normal(tokens, heads, group, RANK), shared) / RANK**0.5
    query = (normal(tokens, heads, group, head_size) + 3 * steer).reshape(tokens, heads * group, head_size)
    q, k, v = (torch.from_numpy(x.astype(np.float32)) for x in (query, key, normal(tokens, heads, head_size)))
    return (rotate(q), rotate(k), v) if rope else (q, k, v)


def scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(heads, group, queries, keys) of (tokens, query heads, d) and (tokens, heads, d), in float64."""
    q = query.double().unflatten(1, (key.shape[1], -1))
    return torch.einsum("thgd,shd->hgts", q, key.double())


def score_error(query: torch.Tensor, key: torch.Tensor, key_hat: torch.Tensor) -> float:
    """Relative error of q . K over all pairs of queries and keys."""
    exact = scores(query, key)
    return ((scores(query, key_hat) - exact).norm() / exact.norm()).item()

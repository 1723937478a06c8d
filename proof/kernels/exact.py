"""Attention over packed pages in float64: the reference for the kernels' outputs."""

from __future__ import annotations

import torch

from vllm_kvq.formats import PageFormat

Exact = tuple[torch.Tensor, torch.Tensor]


def exact_attention(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
    cap: float = 0.0,
) -> Exact:
    """Float64 attention over the same codes; `table` as in `attend_table`, every page in [low, high) packed. `cap`:
    the soft cap of scores; 0: none."""
    n, q, query_heads, d = query.shape
    heads = pages.shape[1]
    out = torch.zeros(n, q, query_heads, d, dtype=torch.float64)
    lse = torch.full((n, q, query_heads), -torch.inf, dtype=torch.float64)
    for i in range(n):
        first, last = int(low[i]), int(high[i])
        if last <= first:
            continue
        ids = table[i, first // fmt.N : -(-last // fmt.N)].long()
        fields = fmt.unpack(fmt.read(pages, ids))
        offset = first // fmt.N * fmt.N
        keys, values = (
            x.unflatten(0, (-1, heads)).transpose(0, 1).flatten(1, 2)[:, first - offset : last - offset, :d].double()
            for x in fields
        )
        rows = query[i].double().unflatten(1, (heads, -1)).permute(1, 0, 2, 3)  # (H, q, g, d)
        scores = torch.einsum("hqgd,htd->hqgt", rows, keys) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        lse[i] = scores.logsumexp(-1).transpose(0, 1).flatten(1)
        got = torch.einsum("hqgt,htd->hqgd", scores.softmax(-1), values)
        out[i] = got.transpose(0, 1).flatten(1, 2)
    return out, lse


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))

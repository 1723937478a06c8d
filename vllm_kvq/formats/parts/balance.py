"""Scales per token and per channel that give all tokens and all channels of a tile equal variation, as in KVarN.

repeat:  X_t. /= std(X_t.) for all tokens t,  then  X_.c /= std(X_.c) for all channels c
s_t, s_c = the divisors of rows and columns in the iterate with the least imbalance
imbalance = the largest standard deviation of a row or a column / the smallest
"""

from __future__ import annotations

import vllm_kvq.late_torch as torch
from vllm_kvq.formats.parts.quant import positive_half

FLAT = 1e-6
"""Rows and columns that vary by less than this fraction of the tile stay as they are: equal tokens, dead channels."""


def balanced(x: torch.Tensor, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., T, d) -> s_t (..., T, 1) with a geometric mean of 1, and s_c (..., 1, d), both as float16 stores them."""
    flat = FLAT * x.std((-2, -1), keepdim=True)
    rows, columns = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    kept, least = (rows, columns), torch.full_like(flat, torch.inf)
    for _ in range(rounds + 1):
        across, along = (_log_std(x, rows, columns, dim, flat) for dim in (-1, -2))
        most = torch.maximum(across.amax((-2, -1), keepdim=True), along.amax((-2, -1), keepdim=True))
        imbalance = most - torch.minimum(across.amin((-2, -1), keepdim=True), along.amin((-2, -1), keepdim=True))
        better = imbalance < least
        least = torch.where(better, imbalance, least)
        kept = torch.where(better, rows, kept[0]), torch.where(better, columns, kept[1])
        rows = rows + across
        columns = columns + _log_std(x, rows, columns, -2, flat)
    middle = kept[0].mean(-2, keepdim=True)
    return positive_half((kept[0] - middle).exp()), positive_half((kept[1] + middle).exp())


def _log_std(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dim: int, flat: torch.Tensor) -> torch.Tensor:
    std = (x / (rows + columns).exp()).std(dim, keepdim=True)
    return torch.where(x.std(dim, keepdim=True) > flat, std.clamp_min(1e-30).log(), 0)

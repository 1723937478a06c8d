"""What a planned attention reads, by lists: packed pages, and tokens in full precision."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_kvq.kernels.torch.pack import Pair


class PageList(NamedTuple):
    """The pages of n requests in one list, by request."""

    ids: torch.Tensor
    """(P,) rows of the layer's pages (B, H, record_bytes)."""
    owner: torch.Tensor
    """(P,) the request, of n, that each page belongs to."""
    low: torch.Tensor
    """(P,) tokens [low, high) of each page are attended."""
    high: torch.Tensor


class TokenList(NamedTuple):
    """n requests' tokens in full precision, where they lie in two pools."""

    pool: Pair
    """Keys and values (blocks, slots, H, d)."""
    more: Pair
    """The same; its rows are counted from the end of `pool`."""
    rows: torch.Tensor
    """(n, t): token j of request i is row rows[i, j], which is block * slots + slot; negative where there is none."""
    seen: torch.Tensor
    """(n, q, t) booleans: whether query j of request i sees a token."""

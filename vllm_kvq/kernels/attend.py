"""Attention over packed pages and over full-precision tokens, in vectorised PyTorch, and their merge.

    part i:  o_i = softmax(s_i) V_i,  l_i = log sum exp s_i,  s_i = scale * q . k
    merge:   o = sum_i exp(l_i - l) o_i,  l = log sum_i exp l_i

These are the kernels of every device that has none of its own, and what every other kernel is compared with. They
take whole tensors: no loop runs per token, per head or (in decode) per request.
"""

from __future__ import annotations

import torch

from vllm_kvq.formats import PageFormat

WORK_BYTES = 64 << 20
"""Unpacked float32 that a part may hold at once: pages beyond it are attended in several rounds."""

Partial = tuple[torch.Tensor, torch.Tensor]
"""(T, Hq, d) float32 outputs and (T, Hq) log-sum-exps; -inf where a query saw nothing."""


def merge(parts: list[Partial]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([p[1] for p in parts])
    weight = (lse - lse.amax(0)).exp()
    weight = weight / weight.sum(0)
    out = parts[0][0] * weight[0].unsqueeze(-1)
    for (o, _), w in zip(parts[1:], weight[1:], strict=True):
        out = torch.addcmul(out, o, w.unsqueeze(-1))
    return out


def softmax_part(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., keys) masked scores -> unnormalised weights and the log of their sum; an empty row gives 0 and -inf."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.clamp_min(-1e30)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.clamp_min(1e-30), (top + total.clamp_min(1e-30).log()).squeeze(-1)


def attend_raw(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> Partial:
    """n requests of the same padded shape: query (n, q, Hq, d), key and value (n, t, H, d), seen (n, q, t) booleans."""
    n, q, query_heads, d = query.shape
    heads = key.shape[2]
    rows = query.float().reshape(n, q, heads, -1, d).transpose(1, 2).flatten(2, 3)  # (n, H, q * g, d)
    scores = (rows @ key.float().permute(0, 2, 3, 1)) * scale
    scores = scores.unflatten(2, (q, -1)).masked_fill(~seen[:, None, :, None], float("-inf"))
    weights, lse = softmax_part(scores)
    out = weights.flatten(2, 3) @ value.float().permute(0, 2, 1, 3)
    out = out.unflatten(2, (q, -1)).transpose(1, 2).reshape(n, q, query_heads, d)
    return out, lse.transpose(1, 2).reshape(n, q, query_heads)


def attend_packed(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    owner: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
) -> Partial:
    """n requests with q queries each over their packed tokens: split by page, then reduced per request.

    query (n, q, Hq, head_size); the P pages of all requests in one list: page_ids (P,) rows of
    pages (B, H, record_bytes), owner (P,) their request, tokens [low, high) of each are attended.
    """
    n, q, query_heads, _ = query.shape
    heads, d = pages.shape[1], fmt.geometry.d
    group = query_heads // heads
    wide = fmt.widen(query)[0].reshape(n, q, heads, group, d).transpose(1, 2).reshape(n, heads, q * group, d)
    rows = fmt.keys.query_features(wide) * scale
    out = torch.zeros(n, heads, q * group, d, device=query.device)
    top = torch.full((n, heads, q * group), -1e30, device=query.device)
    total = torch.zeros_like(top)
    # scores and unpacked features of a page, in float32
    page_bytes = 4 * heads * fmt.N * (rows.shape[-1] + 2 * d + 2 * q * group)
    position = torch.arange(fmt.N, device=query.device)
    for at in torch.arange(len(page_ids), device=owner.device).split(max(1, WORK_BYTES // page_bytes)):
        fields = fmt.read(pages, page_ids[at])
        key = fmt.keys.key_features(fields).unflatten(0, (-1, heads))
        value = fmt.values.unpack(fields).unflatten(0, (-1, heads))
        mine = owner[at]
        scores = rows[mine] @ key.transpose(-2, -1)  # (p, H, q * g, N)
        seen = (position >= low[at, None]) & (position < high[at, None])
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        best = scores.amax(-1).clamp_min(-1e30)
        new_top = top.index_reduce(0, mine, best, "amax")
        weights = (scores - new_top[mine].unsqueeze(-1)).exp()
        shrink = (top - new_top).exp()
        total = (total * shrink).index_add_(0, mine, weights.sum(-1))
        out = (out * shrink.unsqueeze(-1)).index_add_(0, mine, weights @ value)
        top = new_top
    out = out / total.clamp_min(1e-30).unsqueeze(-1)
    lse = torch.where(total > 0, top + total.clamp_min(1e-30).log(), float("-inf"))
    return (
        out.unflatten(2, (q, group)).transpose(1, 2).reshape(n, q, query_heads, d)[..., : fmt.geometry.head_size],
        lse.unflatten(2, (q, group)).transpose(1, 2).reshape(n, q, query_heads),
    )

"""Attention over packed pages and over full-precision tokens, in vectorised PyTorch, and their merge.

    part i:  o_i = softmax(s_i) V_i,  l_i = log sum exp s_i,  s_i = scale * q . k
             with a soft cap (Gemma-2), cap * tanh(s_i / cap) in place of s_i
    merge:   o = sum_i exp(l_i - l) o_i,  l = log sum_i exp l_i

They serve every codec on every device and are the reference for all other kernels. They process whole tensors: no
loop runs per token, per head or (in a decode step) per request.
"""

from __future__ import annotations

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.kernels.torch.lists import PageList, TokenList
from vllm_kvq.kernels.torch.pack import gather

WORK_BYTES = 64 << 20
"""Unpacked float32 that a part may hold at once: more pages than this are attended in several rounds."""

DECODE_QUERIES = 8
"""With up to this many queries per request a step is decode (one, or a verified draft): batched by page."""

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


def join(a: Partial, b: Partial) -> Partial:
    """Two parts as one."""
    total = torch.logaddexp(a[1].float(), b[1].float())
    first, second = ((lse - total).exp().unsqueeze(-1) for lse in (a[1], b[1]))
    return torch.addcmul(a[0] * first, b[0], second), total


def with_learned(part: Partial, learned: torch.Tensor | None) -> Partial:
    """A part, and the layer's learned sinks (Hq,), which have the value 0."""
    if learned is None:
        return part
    out, lse = part
    total = torch.logaddexp(lse, learned.float())
    return out * (lse - total).exp().unsqueeze(-1), total


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Scores under a soft cap; 0: there is none."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def softmax_part(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., keys) masked scores -> unnormalised weights and the log of their sum; an empty row gives 0 and -inf."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.clamp_min(-1e30)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.clamp_min(1e-30), (top + total.clamp_min(1e-30).log()).squeeze(-1)


def attend_raw(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float, cap: float = 0.0
) -> Partial:
    """n requests of the same padded shape: query (n, q, Hq, d), key and value (n, t, H, d), seen (n, q, t) booleans."""
    n, q, query_heads, _ = query.shape
    heads = key.shape[2]
    keys = key.permute(0, 2, 3, 1).float()
    values = value.transpose(1, 2).float()
    # one tile of queries at a time keeps the scores of a long chunk within WORK_BYTES
    tile = max(1, WORK_BYTES // (8 * n * query_heads * key.shape[1]))
    outs, lses = [], []
    for at in range(0, q, tile):
        part = query[:, at : at + tile]
        rows = _by_head(part.float(), heads)
        scores = capped((rows @ keys).mul_(scale), cap).unflatten(2, (part.shape[1], -1))
        scores = scores.masked_fill_(~seen[:, None, at : at + tile, None], float("-inf"))
        weights, lse = softmax_part(scores.flatten(2, 3))
        outs.append(_by_token(weights @ values, part.shape[1]))
        lses.append(_by_token(lse.unsqueeze(-1), part.shape[1]).squeeze(-1))
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(lses, 1))


def attend_into(
    output: torch.Tensor,
    output_rows: torch.Tensor,
    query: torch.Tensor,
    tokens: TokenList,
    scale: float,
    parts: list[Partial],
    cap: float = 0.0,
) -> None:
    """Attention over raw tokens in place, merged with other parts of the same attention into the output.

    query (n, q, Hq, d). Query j of request i goes to row output_rows[i, j] of output (tokens, Hq, d).
    """
    pool, more, rows, seen = tokens
    if not rows.shape[1]:
        output[output_rows] = merge(parts).to(output.dtype)
        return
    there = seen & (rows >= 0)[:, None]
    # a row that no query sees may hold anything, even NaN, which times 0 would still be NaN
    wanted = there.any(1)[..., None, None]
    key, value = (torch.where(wanted, gather(*x, rows.clamp_min(0)), 0) for x in zip(pool, more, strict=True))
    out = merge([attend_raw(query, key, value, there, scale, cap), *parts])
    output[output_rows] = out.to(output.dtype)


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    cap: float = 0.0,
) -> Partial:
    """`kernels.step.Causal`: one prompt at a time, by those of PyTorch's fused kernels that return the log-sum-exp.
    They don't support a soft cap; with one, `attend_raw` is used."""
    share = query.shape[1] // key.shape[1]
    outs, lses, at = [], [], 0
    for n in lengths:
        if not n:
            continue
        if cap:
            alone = [x[None, at : at + n] for x in (query, key, value)]
            earlier = torch.ones(1, n, n, dtype=torch.bool, device=query.device).tril()
            out, lse = attend_raw(alone[0], alone[1], alone[2], earlier, scale, cap)
            outs.append(out[0])
            lses.append(lse[0])
            at += n
            continue
        q, k, v = (x[at : at + n].transpose(0, 1)[None] for x in (query, key, value))
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        out, lse = _fused(q, k, v, True, scale)
        outs.append(out)
        lses.append(lse)
        at += n
    return torch.cat(outs), torch.cat(lses)


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float = 0.0) -> Partial:
    """`kernels.step.Whole`, by the same kernels as `causal`."""
    if cap:
        seen = torch.ones(1, len(query), len(key), dtype=torch.bool, device=query.device)
        out, lse = attend_raw(query[None], key[None], value[None], seen, scale, cap)
        return out[0], lse[0]
    share = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    return _fused(q, k, v, False, scale)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> Partial:
    """(1, Hq, tokens, d) by PyTorch's kernel that returns the log-sum-exp."""
    if q.is_cuda:
        got = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    else:
        got = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    # the log-sum-exp's rows are padded to a multiple of 32
    return got[0][0].transpose(0, 1), got[1][0, :, : q.shape[2]].transpose(0, 1)


def attend_packed(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    listed: PageList,
    scale: float,
    cap: float = 0.0,
) -> Partial:
    """n requests with q queries each, (n, q, Hq, head_size), over their packed tokens in pages (B, H, record_bytes)."""
    n, q, _, _ = query.shape
    heads = pages.shape[1]
    rows = fmt.query_features(_by_head(fmt.widen(query)[0], heads)) * scale  # (n, H, q * g, F)
    if q <= DECODE_QUERIES:
        out, lse = _split_by_page(fmt, rows, pages, listed, cap)
    else:
        own = (PageList(*(x[listed.owner == i] for x in listed)) for i in range(n))
        each = [_one_request(fmt, rows[i], pages, mine, cap) for i, mine in enumerate(own)]
        out, lse = torch.stack([o for o, _ in each]), torch.stack([s for _, s in each])
    return _by_token(out, q)[..., : fmt.geometry.head_size], _by_token(lse.unsqueeze(-1), q).squeeze(-1)


def attend_step(
    fmt: PageFormat,
    output: torch.Tensor,
    output_rows: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    listed: PageList,
    tokens: TokenList,
    scale: float,
    cap: float = 0.0,
) -> bool:
    """`attend_packed` and `attend_into` in one; returns False and does nothing if a page is not packed."""
    if not all_packed(fmt, pages, listed):
        return False
    parts = [attend_packed(fmt, query, pages, listed, scale, cap)] if len(listed.ids) else []
    attend_into(output, output_rows, query, tokens, scale, parts, cap)
    return True


def all_packed(fmt: PageFormat, pages: torch.Tensor, listed: PageList) -> bool:
    """Whether every slab with an attended token holds data."""
    slab = SLAB * torch.arange(fmt.slabs, device=pages.device)
    needed = (slab < listed.high[:, None]) & (slab + SLAB > listed.low[:, None])
    return not (needed & ~fmt.packed_slabs(pages, listed.ids)).any()


def _split_by_page(
    fmt: PageFormat, rows: torch.Tensor, pages: torch.Tensor, listed: PageList, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode: every page is one split, reduced per request by its log-sum-exp."""
    ids, owner, low, high = listed
    n, heads, queries, features = rows.shape
    # a page's unpacked features and scores
    page_bytes = 4 * heads * fmt.N * (features + 2 * fmt.geometry.d + 2 * queries)
    outs, lses = [], []
    for at in range(0, len(ids), max(1, WORK_BYTES // page_bytes)):
        part = slice(at, at + max(1, WORK_BYTES // page_bytes))
        seen = _seen(fmt, low[part], high[part])
        key, value = _unpack(fmt, pages, ids[part], seen)
        scores = capped(rows[owner[part]] @ key.transpose(-2, -1), cap)  # (p, H, q * g, N)
        scores = scores.masked_fill_(~seen[:, None, None], float("-inf"))
        weights, lse = softmax_part(scores)
        outs.append(weights @ value)
        lses.append(lse)
    page_out, page_lse = torch.cat(outs), torch.cat(lses)
    count = torch.bincount(owner, minlength=n)
    place = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner]
    padded = rows.new_full((n, int(count.max()), heads, queries), float("-inf"))
    padded[owner, place] = page_lse
    lse = padded.logsumexp(1)
    weight = (page_lse - lse.clamp_min(-1e30)[owner]).exp().unsqueeze(-1)
    out = rows.new_zeros(n, heads, queries, page_out.shape[-1]).index_add_(0, owner, page_out * weight)
    return out, lse


def _one_request(
    fmt: PageFormat, rows: torch.Tensor, pages: torch.Tensor, listed: PageList, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of a prompt over its history: rounds of pages as one long matrix, with a running softmax."""
    ids, _, low, high = listed
    heads, queries, features = rows.shape
    page_bytes = 4 * heads * fmt.N * (2 * (features + fmt.geometry.d) + 2 * queries)
    step = max(1, WORK_BYTES // page_bytes)
    parts: list[Partial] = []
    for at in range(0, len(ids), step):
        part = slice(at, at + step)
        seen = _seen(fmt, low[part], high[part])
        key, value = (x.transpose(0, 1).flatten(1, 2) for x in _unpack(fmt, pages, ids[part], seen))
        scores = capped(rows @ key.transpose(1, 2), cap).masked_fill_(~seen.flatten(), float("-inf"))
        weights, lse = softmax_part(scores)
        new = weights @ value, lse
        if parts:
            # the running result is merged as one more part
            new = join(parts[0], new)
        parts = [new]
    if parts:
        return parts[0]
    return rows.new_zeros(heads, queries, fmt.geometry.d), rows.new_full((heads, queries), float("-inf"))


def _unpack(
    fmt: PageFormat, pages: torch.Tensor, ids: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(p, H, N, F) key features and (p, H, N, d) values; seen (p, N) booleans.

    A slab that no query sees may hold anything left by the block's last owner: NaN, which times 0 would still be NaN,
    and invalid indices. It is read as zeros.
    """
    data = pages[ids]
    slabs = data[..., fmt.slabs_at :][..., : fmt.slabs * fmt.slab_region.nbytes].unflatten(-1, (fmt.slabs, -1))
    slabs.masked_fill_(~seen.unflatten(1, (fmt.slabs, -1)).any(-1)[:, None, :, None], 0)
    fields = fmt.read(data, torch.arange(len(ids), device=ids.device))
    shape = (-1, pages.shape[1])
    return fmt.key_features(fields).unflatten(0, shape), fmt.values.unpack(fields).unflatten(0, shape)


def _seen(fmt: PageFormat, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    position = torch.arange(fmt.N, device=low.device)
    return (position >= low[:, None]) & (position < high[:, None])


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(n, q, Hq, d) -> (n, H, q * g, d), grouping the query heads of each KV head."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)


def _by_token(x: torch.Tensor, q: int) -> torch.Tensor:
    """The inverse of `_by_head`."""
    return x.unflatten(2, (q, -1)).transpose(1, 2).flatten(2, 3)

"""Kernels for what a step stores: raw tokens packed into pages, and a prompt's state; in vectorised PyTorch.

They serve every codec on every device and are the reference for all other kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvq.formats import PageFormat

PACK_BYTES = 64 << 20
"""The amount of float32 that packing may hold at once."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


@dataclass(frozen=True)
class Units:
    """Pack units that a step completes: unit `unit[i]` of page `page[i]`."""

    page: torch.Tensor
    unit: torch.Tensor
    rows: torch.Tensor
    """(units, P): rows of the old tokens' pool (block * slots + slot), followed by those of the new tokens."""
    owner: torch.Tensor
    """The row of the state that each unit uses."""
    follows: torch.Tensor
    """Booleans: the page was started in an earlier step, and the unit uses its existing page parameters."""
    position: torch.Tensor
    """The position of each unit's first token."""
    decoded: torch.Tensor | None = None
    """Booleans: a decode step completes the unit; None: prompts complete all of them."""


def pack(
    fmt: PageFormat, pages: torch.Tensor, units: Units, old: Pair, new: Pair, state: torch.Tensor | None
) -> torch.Tensor:
    """Write the units; returns how many elements were replaced because no format can hold them.

    pages (B, H, record_bytes); old keys and values (blocks, slots, H, head_size), new ones (tokens, H, head_size);
    state (owners, H, state_rows, d) float32, None if the keys have no state.
    """
    heads = pages.shape[1]
    step = max(1, PACK_BYTES // (4 * fmt.unit * heads * fmt.geometry.d * 8))
    replaced = torch.zeros((), dtype=torch.int64, device=pages.device)
    for at in range(0, len(units.page), step):
        some = slice(at, at + step)
        page, unit = units.page[some], units.unit[some]
        (k, lost_k), (v, lost_v) = (
            fmt.widen(gather(a, b.unsqueeze(1), units.rows[some])) for a, b in zip(old, new, strict=True)
        )
        replaced += lost_k + lost_v
        mine = None if state is None else state[units.owner[some]].flatten(0, 1)
        follows = units.follows[some]
        if mine is not None and fmt.keys.page_fields and follows.any():
            begun = fmt.read_page_fields(pages[page].flatten(0, 1))
            kept = fmt.keys.page_state(begun)
            if kept is not None:
                mine = torch.where(follows.repeat_interleave(heads)[:, None, None], kept, mine)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        position = units.position[some].repeat_interleave(heads)
        decoded = None if units.decoded is None else units.decoded[some].repeat_interleave(heads)
        fmt.write(pages, page, unit, fmt.pack(k, v, mine, decoded, position))
    return replaced


def gather(pool: torch.Tensor, more: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Tokens (*rows.shape, H, d) by row: first those of `pool` (blocks, slots, H, d), then those of `more`."""
    stored, slots = pool.shape[0] * pool.shape[1], pool.shape[1]
    if not len(more):
        return pool[rows // slots, rows % slots]
    if not stored:
        return more[rows // more.shape[1], rows % more.shape[1]]
    late = rows >= stored
    at = torch.where(late, 0, rows)
    out = pool[at // slots, at % slots]
    after = rows[late] - stored
    out[late] = more[after // more.shape[1], after % more.shape[1]]
    return out


def store(pool: Pair, rows: torch.Tensor, new: Pair, source: torch.Tensor) -> None:
    """Row rows[i] of the pool, block * slots + slot, gets row source[i] of the new tokens (tokens, H, d)."""
    slots = pool[0].shape[1]
    for to, x in zip(pool, new, strict=True):
        to[rows // slots, rows % slots] = x[source]


def fit(fmt: PageFormat, query: torch.Tensor, key: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """The state (H, state_rows, d) after a chunk: query (n, Hq, head_size), key (n, H, head_size)."""
    q, k = fmt.widen(query if fmt.keys.fits_queries else query[:0])[0], fmt.widen(key)[0]
    grouped = q.unflatten(1, (key.shape[1], -1)).transpose(0, 1).flatten(1, 2)
    return fmt.keys.fit(grouped, k.transpose(0, 1), state)

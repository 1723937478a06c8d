"""The reference over whole lives: every row of every request in one forward pass, layer by layer.

The tokens are known (they are the engine's), so nothing has to be computed step by step: layer l of all rows needs
only layer l - 1 of all rows. A row is one token of one chunk; rejected drafts are rows too. With c tokens before its
chunk and the reference's boundary B(c), the row at position p sees

    packed   tokens t of its life or of its hit,  S <= t < B(c)
    raw      rows of its own chunk up to p, and kept rows t < c of earlier chunks with t < S or t >= B(c);
             after a hit, the sinks t < S of the life that wrote page 0

in one softmax. It is `formats.reference.ReferenceCache` for all steps at once, and a test holds the two together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proof.oracle.lives import Life
from proof.oracle.replay import NOISE, ReplayModel
from vllm_kvq.formats import PageFormat

ATTENTION = "kvq_whole"
PACK_UNITS = 512
"""Units packed at once, to bound memory."""


class _Running(threading.local):
    """The replay that this thread computes: Transformers calls `_attention` without telling."""

    now: Whole | None = None


_running = _Running()


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: (1, heads, rows, d) each, post-RoPE."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    assert _running.now is not None
    return _running.now.attend(module.layer_idx, q, k, v, scaling)[None].to(query.dtype), None


@dataclass(frozen=True)
class _Plan:
    """What one life reads, the same in every layer."""

    rows: slice
    sinks: torch.Tensor
    """Rows of the sinks of a hit."""
    units: torch.Tensor
    """The packed units, numbered over all lives, from unit 0 on."""
    seen: torch.Tensor
    """(rows, sinks + rows + packed tokens)."""
    fits: list[slice]
    """Rows of each chunk that moves the state."""


class Whole:
    def __init__(self, model: ReplayModel, lives: Sequence[Life]) -> None:
        """`lives` with all lives that they hit, writers first."""
        self.model, self.lives = model, list(lives)
        # no layer differs in what it reads
        self.fmt: PageFormat = model.formats[0]
        tokens: list[int] = []
        position: list[int] = []
        first: dict[Life, int] = {}
        for life in self.lives:
            first[life] = len(tokens)
            for part in life.parts:
                # vLLM pads a lone prompt token with drafts of -1, which are computed as token 0 and never accepted
                tokens += [max(t, 0) for t in part.tokens]
                position += range(part.context, part.end)
        self.first = first
        self.tokens, self.position = torch.tensor(tokens), torch.tensor(position)
        self._canonical: dict[Life, dict[int, int]] = {}
        self._unit_index: dict[Life, dict[int, int]] = {}
        self._unit_rows: list[list[int]] = []
        self._unit_state: list[tuple[int, int]] = []
        self.plans = [self._plan(number, life) for number, life in enumerate(self.lives)]
        self.unit_rows = torch.tensor(self._unit_rows).reshape(-1, self.fmt.unit)

    def row(self, life: Life, part: int, position: int) -> int:
        before = sum(len(p.tokens) for p in life.parts[:part])
        return self.first[life] + before + position - life.parts[part].context

    # -- what is read ----------------------------------------------------------------------------------------------
    def _plan(self, number: int, life: Life) -> _Plan:
        fmt, p = self.fmt, self.fmt.unit
        context: list[int] = []
        position: list[int] = []
        part_of: list[int] = []
        kept: list[bool] = []
        for i, part in enumerate(life.parts):
            upcoming = life.parts[i + 1].context if i + 1 < len(life.parts) else part.end
            count = len(part.tokens)
            context += [part.context] * count
            part_of += [i] * count
            position += range(part.context, part.end)
            kept += [t < upcoming for t in range(part.context, part.end)]
        first = self.first[life]
        at = {t: first + i for i, (t, k) in enumerate(zip(position, kept, strict=True)) if k}
        self._canonical[life] = at
        fits = self._pack_events(number, life, at)

        c, t, who, there = (torch.tensor(x) for x in (context, position, part_of, kept))
        boundary = ((c - fmt.W) // p * p).clamp_min(life.start)[:, None]
        before = (who < who[:, None]) & there & ((t < fmt.S) | (t >= boundary))
        raw = before | ((who == who[:, None]) & (t <= t[:, None]))
        index = self._unit_index[life]
        packed = torch.arange(int(boundary.max()) if len(c) else 0)
        sinks = [self._canonical[life.hit[0][0]][s] for s in range(min(fmt.S, life.start))] if life.hit else []
        seen = torch.cat(
            [torch.ones(len(c), len(sinks), dtype=torch.bool), raw, (packed >= fmt.S) & (packed < boundary)], dim=1
        )
        units = torch.tensor([index.get(u, -1) for u in range(len(packed) // p)], dtype=torch.long)
        # units below the sinks' end may never have been needed
        if (units[fmt.S // p :] < 0).any():
            raise RuntimeError(f"{life.name}: a unit that was never packed would have been read")
        return _Plan(
            slice(first, first + len(c)), torch.tensor(sinks, dtype=torch.long), units.clamp_min(0), seen, fits
        )

    def _pack_events(self, number: int, life: Life, at: dict[int, int]) -> list[slice]:
        """Number the units of this life; a unit that is packed again after rejected drafts takes the last state."""
        fmt, p = self.fmt, self.fmt.unit
        per_page = fmt.N // p
        index = {
            i * per_page + u: self._unit_index[writer][page * per_page + u]
            for i, (writer, page) in enumerate(life.hit)
            for u in range(per_page)
        }
        own = life.start + fmt.W if life.start else 0
        states: dict[int, int] = {}
        page_state: dict[int, int] = {}
        fits: list[slice] = []
        row = self.first[life]
        for part in life.parts:
            new = len(part.tokens)
            if fmt.state_rows and (new > 1 + self.model.num_spec or part.context == life.start):
                fits.append(slice(row, row + new))
            row += new
            for unit in range(max(part.context, own) // p, part.end // p):
                page = unit // per_page
                if unit % per_page == 0 or page not in page_state:
                    page_state[page] = len(fits) - 1
                states[unit] = page_state[page] if fmt.keys.page_fields else len(fits) - 1
        for unit, state in states.items():
            rows = [at.get(t, -1) for t in range(unit * p, (unit + 1) * p)]
            if min(rows) >= 0:  # else it ends in drafts that were never accepted
                index[unit] = len(self._unit_rows)
                self._unit_rows.append(rows)
                self._unit_state.append((number, state))
        self._unit_index[life] = index
        return fits

    # -- one layer -------------------------------------------------------------------------------------------------
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """(rows, heads, d) queries, keys and values of all rows -> outputs."""
        model = self.model
        q, k, v = (model.disturbed(x, NOISE) for x in (q, k, v))
        key, value = self._packed(model.formats[layer], q, k, v)
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for plan in self.plans:
            rows = plan.rows
            keys, values = (
                torch.cat([x[plan.sinks], x[rows], packed[plan.units].transpose(1, 2).flatten(0, 1)]).transpose(0, 1)
                for x, packed in ((k, key), (v, value))
            )
            # (H, g * rows, d): all query heads of a KV head together
            mine = q[rows].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            scores = (mine.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (group, -1)) * scale
            weights = scores.masked_fill_(~plan.seen, float("-inf")).softmax(-1)
            part = (weights.flatten(1, 2) @ values).unflatten(1, (group, -1))
            out[rows] = part.permute(2, 0, 1, 3).flatten(1, 2)
        return model.disturbed(out, model.kernel_error)

    def _packed(
        self, fmt: PageFormat, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(units, H, P, head_size) keys and values as they are read back."""
        heads, size = k.shape[1:]
        states = self._states(fmt, q, k) if fmt.state_rows else None
        parts = []
        for i in range(0, len(self.unit_rows), PACK_UNITS):
            rows = self.unit_rows[i : i + PACK_UNITS]
            state = None
            if states is not None:
                state = torch.stack([states[s] for s in self._unit_state[i : i + PACK_UNITS]]).flatten(0, 1)
            ks, vs = (fmt.widen(x[rows])[0].transpose(1, 2).flatten(0, 1) for x in (k, v))
            decoded = fmt.unpack(fmt.pack(ks, vs, state))
            parts.append([x[..., :size].unflatten(0, (-1, heads)) for x in decoded])
        if not parts:
            empty = k.new_zeros(1, heads, fmt.unit, size)
            return empty, empty
        key, value = (torch.cat(x) for x in zip(*parts, strict=True))
        return key, value

    def _states(self, fmt: PageFormat, q: torch.Tensor, k: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        """(life, number of its fit) -> state."""
        states = {}
        for number, plan in enumerate(self.plans):
            state = None
            for i, rows in enumerate(plan.fits):
                query, key = fmt.widen(q[rows])[0], fmt.widen(k[rows])[0]
                grouped = query.unflatten(1, (key.shape[1], -1)).transpose(0, 1).flatten(1, 2)
                state = fmt.keys.fit(grouped, key.transpose(0, 1), state)
                states[number, i] = state
        return states

    # -- all layers ------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(len(rows), vocabulary)."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attention)
        network = self.model.model
        before = network.config._attn_implementation
        network.set_attn_implementation(ATTENTION)
        _running.now = self
        try:
            out = network(
                input_ids=self.tokens[None],
                position_ids=self.position[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        finally:
            network.set_attn_implementation(before)
            _running.now = None
        return out.logits[0]

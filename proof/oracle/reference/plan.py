"""What every token of every life reads, and which units are packed for it; the same in all layers.

A row is one token of one chunk; rejected drafts are rows too. With c tokens before its chunk and the reference's
boundary B(c), the row at position p sees

    packed   tokens t of its life or of its hit,  S <= t < B(c)
    raw      rows of its own chunk up to p, and kept rows t < c of earlier chunks with t < S or t >= B(c);
             after a hit, the sinks t < S of the life that wrote page 0

and in a layer that stays in vLLM's own cache the kept rows of all earlier chunks and its own, up to p, and after a hit
those of the lives that wrote the pages that it finds there. The state of a layer that keeps one follows from the rows
of all tokens before: those of the life that left it, of the one that left that life's, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proof.oracle.reference.lives import Life
from vllm_kvq.formats import PageFormat


@dataclass(frozen=True)
class Reads:
    """What the rows of one life read. What each of them sees is given only for `some` of them: for all rows of a long
    prompt it would take gigabytes."""

    rows: slice
    sinks: torch.Tensor
    """Rows of the sinks of a hit."""
    units: torch.Tensor
    """The packed units, numbered over all lives, from unit 0 on."""
    fits: list[slice]
    """Rows of each chunk that moves the state."""
    position: torch.Tensor
    part: torch.Tensor
    """The chunk of each row."""
    there: torch.Tensor
    """Whether later chunks see the row: it is no rejected draft."""
    first_packed: int
    """S: where packed tokens begin."""
    boundary: torch.Tensor
    """B of each row."""
    packed_tokens: int

    def before(self, some: slice) -> torch.Tensor:
        """(some, rows) which rows of the life are there, up to the row itself."""
        earlier = (self.part < self.part[some, None]) & self.there
        return earlier | self._own(some)

    def seen(self, some: slice) -> torch.Tensor:
        """(some, sinks + rows + packed tokens)"""
        raw = (self.position < self.first_packed) | (self.position >= self.boundary[some, None])
        raw &= (self.part < self.part[some, None]) & self.there
        raw |= self._own(some)
        packed = torch.arange(self.packed_tokens)
        packed = (packed >= self.first_packed) & (packed < self.boundary[some, None])
        return torch.cat([torch.ones(len(raw), len(self.sinks), dtype=torch.bool), raw, packed], dim=1)

    def _own(self, some: slice) -> torch.Tensor:
        return (self.part == self.part[some, None]) & (self.position <= self.position[some, None])


class Plan:
    """The plan of several lives."""

    def __init__(self, fmt: PageFormat, num_spec: int, lives: Sequence[Life]) -> None:
        """`lives` with all lives that they hit, writers first."""
        self.fmt, self.num_spec = fmt, num_spec
        tokens: list[int] = []
        position: list[int] = []
        self.first: dict[Life, int] = {}
        for life in lives:
            self.first[life] = len(tokens)
            for part in life.parts:
                # vLLM pads a lone prompt token with drafts of -1, which are computed as token 0 and never accepted
                tokens += [max(t, 0) for t in part.tokens]
                position += range(part.context, part.end)
        self.tokens, self.position = torch.tensor(tokens), torch.tensor(position)
        self._canonical: dict[Life, dict[int, int]] = {}
        self._unit_index: dict[Life, dict[int, int]] = {}
        self._unit_rows: list[list[int]] = []
        self.unit_state: list[tuple[int, int]] = []
        """(life, number of its fit) of the state that each unit is packed with."""
        self._unit_decoded: list[bool] = []
        self.lives = lives
        self.reads = [self._reads(number, life) for number, life in enumerate(lives)]
        self.unit_decoded = torch.tensor(self._unit_decoded, dtype=torch.bool)
        """Whether a decode step completes the unit."""
        self.unit_rows = torch.tensor(self._unit_rows).reshape(-1, fmt.unit)

    def row(self, life: Life, part: int, position: int) -> int:
        before = sum(len(p.tokens) for p in life.parts[:part])
        return self.first[life] + before + position - life.parts[part].context

    def found(self, life: Life, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of the tokens of a hit in a layer that stays in vLLM's own cache."""
        tokens = life.hit_in(layer, self.fmt.N).tokens()
        rows = torch.tensor([self._canonical[writer][t] for writer, t in tokens], dtype=torch.long)
        return rows, torch.tensor([t for _, t in tokens], dtype=torch.long)

    def past(self, life: Life, layer: int) -> list[int]:
        """Rows of the tokens before this life, from whose state the layer's goes on."""
        if not life.start:
            return []
        writer = life.states[layer]
        own = range(writer.start, life.start)
        return [*self.past(writer, layer), *(self._canonical[writer][t] for t in own)]

    def _reads(self, number: int, life: Life) -> Reads:
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
        boundary = ((c - fmt.W) // p * p).clamp_min(life.start)
        index = self._unit_index[life]
        packed = int(boundary.max()) if len(c) else 0
        sinks = [self._canonical[life.hit[0][0]][s] for s in range(min(fmt.S, life.start))] if life.hit else []
        units = torch.tensor([index.get(u, -1) for u in range(packed // p)], dtype=torch.long)
        # units below the sinks' end may never have been needed
        if (units[fmt.S // p :] < 0).any():
            raise RuntimeError(f"{life.name}: a unit that was never packed would have been read")
        return Reads(
            rows=slice(first, first + len(c)),
            sinks=torch.tensor(sinks, dtype=torch.long),
            units=units.clamp_min(0),
            fits=fits,
            position=t,
            part=who,
            there=there,
            first_packed=fmt.S,
            boundary=boundary,
            packed_tokens=packed,
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
        states: dict[int, tuple[int, bool]] = {}
        page_state: dict[int, int] = {}
        fits: list[slice] = []
        row = self.first[life]
        for part in life.parts:
            new = len(part.tokens)
            prompt = new > 1 + self.num_spec or part.context == life.start
            if prompt:
                fits.append(slice(row, row + new))
            row += new
            for unit in range(part.context // p, part.end // p):
                page = unit // per_page
                if unit % per_page == 0 or page not in page_state:
                    page_state[page] = len(fits) - 1
                states[unit] = (page_state[page] if fmt.keys.page_fields else len(fits) - 1), not prompt
        for unit, (state, decoded) in states.items():
            rows = [at.get(t, -1) for t in range(unit * p, (unit + 1) * p)]
            if min(rows) >= 0:  # else it ends in drafts that were never accepted
                index[unit] = len(self._unit_rows)
                self._unit_rows.append(rows)
                self.unit_state.append((number, state))
                self._unit_decoded.append(decoded)
        self._unit_index[life] = index
        return fits

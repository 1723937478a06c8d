"""The reference cache: what attention over a format must give, computed from nothing but positions.

It knows no blocks, slots or batches: a request is a list of chunks, and token p is read in full precision if p < S or
p >= B, else through its packed unit, with

    B = max(floor((c - W) / P) * P, start)      for a chunk after c tokens

Kernels and the integration are compared with it, step by step. It is written for readability, not for speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proof.oracle.reference.attention import Mixer
from proof.oracle.reference.kinds import Sight
from vllm_kvq.formats.page import PageFormat

Unit = tuple[torch.Tensor, torch.Tensor]
"""(P, H, head_size) keys and values of a pack unit as they are read back."""


@dataclass(frozen=True)
class CachedPage:
    units: list[Unit]
    sink_key: torch.Tensor
    sink_value: torch.Tensor


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Scores under a soft cap; 0: there is none."""
    return cap * torch.tanh(scores / cap) if cap else scores


class ReferenceCache:
    """One request's cache of one layer."""

    def __init__(self, fmt: PageFormat, heads: int, num_spec: int = 0) -> None:
        self.fmt, self.num_spec = fmt, num_spec
        self.learned: torch.Tensor | None = None
        """(query heads,) learned sinks: scores of a token whose value is 0."""
        self.start = 0
        self.state: torch.Tensor | None = None
        self.key = torch.zeros(0, heads, fmt.geometry.head_size)
        self.value = torch.zeros(0, heads, fmt.geometry.head_size)
        self.packed: dict[int, Unit] = {}
        self.page_state: dict[int, torch.Tensor | None] = {}
        """Page -> the state it was begun with."""

    def page(self, index: int) -> CachedPage:
        """What the prefix cache keeps of a complete page: its packed units, and the sinks in full precision."""
        fmt = self.fmt
        first, last = index * fmt.N // fmt.unit, (index + 1) * fmt.N // fmt.unit
        sinks = slice(0, fmt.S if index == 0 else 0)
        units = [self.packed[u] for u in range(first, last)]
        return CachedPage(units, self.key[sinks].clone(), self.value[sinks].clone())

    @classmethod
    def after_hit(cls, fmt: PageFormat, heads: int, pages: list[CachedPage], num_spec: int = 0) -> ReferenceCache:
        """A new request that found these pages; it packs what comes behind them."""
        new = cls(fmt, heads, num_spec)
        new.start = len(pages) * fmt.N
        # nothing but sinks may be read from here in full precision
        new.key = torch.full((new.start, heads, fmt.geometry.head_size), float("nan"))
        new.value = new.key.clone()
        sinks = min(fmt.S, new.start)
        new.key[:sinks], new.value[:sinks] = pages[0].sink_key[:sinks], pages[0].sink_value[:sinks]
        for i, unit in enumerate(u for page in pages for u in page.units):
            new.packed[i] = unit
        return new

    def rewind(self, length: int) -> None:
        """Forget rejected drafts."""
        self.key, self.value = self.key[:length], self.value[:length]

    def step(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float = 0.0
    ) -> torch.Tensor:
        """Append a chunk of q tokens and attend: query (q, Hq, head_size), key and value (q, H, head_size). `cap`: the
        soft cap of scores; 0: none."""
        context, new = len(self.key), len(key)
        self.key, self.value = torch.cat([self.key, key]), torch.cat([self.value, value])
        prompt = new > 1 + self.num_spec or context == self.start
        if self.fmt.state_rows and prompt:
            self._fit(query, key)
        self._pack(context, prompt)
        return self.share(query, scale, cap)

    def share(self, query: torch.Tensor, scale: float, cap: float = 0.0) -> torch.Tensor:
        """Another layer's queries over what the last chunk attended, its own tokens included."""
        return self._attend(query, len(self.key) - len(query), scale, cap)

    def _fit(self, query: torch.Tensor, key: torch.Tensor) -> None:
        q, k = (self.fmt.widen(x)[0] for x in (query, key))
        grouped = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 2)
        self.state = self.fmt.keys.fit(grouped, k.transpose(0, 1), self.state)

    def _pack(self, context: int, prompt: bool) -> None:
        """Every unit that this chunk completes."""
        fmt, p = self.fmt, self.fmt.unit
        for unit in range(context // p, len(self.key) // p):
            at, page = slice(unit * p, (unit + 1) * p), unit * p // fmt.N
            if unit * p % fmt.N == 0 or page not in self.page_state:
                self.page_state[page] = self.state
            state = self.page_state[page] if fmt.keys.page_fields else self.state
            k, v = (fmt.widen(x[at])[0].transpose(0, 1) for x in (self.key, self.value))
            decoded, position = torch.full((len(k),), not prompt), torch.full((len(k),), unit * p)
            k, v = fmt.unpack(fmt.pack(k, v, state, decoded, position))
            d = fmt.geometry.head_size
            self.packed[unit] = k.transpose(0, 1)[..., :d], v.transpose(0, 1)[..., :d]

    def history(self, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens as a chunk after `context` tokens reads them."""
        fmt, p = self.fmt, self.fmt.unit
        key, value = self.key.float().clone(), self.value.float().clone()
        boundary = max((context - fmt.W) // p * p, self.start, 0)
        for unit in range(fmt.S // p, boundary // p):
            first = max(unit * p, fmt.S)
            for x, packed in zip((key, value), self.packed[unit], strict=True):
                x[first : (unit + 1) * p] = packed[first - unit * p :]
        return key, value

    def _attend(self, query: torch.Tensor, context: int, scale: float, cap: float) -> torch.Tensor:
        key, value = self.history(context)
        group = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = capped(torch.einsum("qhd,thd->hqt", query.float(), k) * scale, cap)
        position = context + torch.arange(len(query))[:, None]
        return _weigh(scores.masked_fill(torch.arange(len(k)) > position, float("-inf")), v, self.learned)


def _weigh(scores: torch.Tensor, value: torch.Tensor, learned: torch.Tensor | None) -> torch.Tensor:
    """(heads, queries, tokens) scores and (tokens, heads, d) values -> (queries, heads, d)."""
    if learned is not None:
        scores = torch.cat([scores, learned[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    return torch.einsum("hqt,thd->qhd", scores.softmax(-1)[..., : len(value)], value)


class ExactCache:
    """One request's cache of a layer that stays in vLLM's own."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self.learned: torch.Tensor | None = None
        self.key = self.value = torch.zeros(0)

    def page(self, index: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the page's n tokens, which are as they were computed."""
        at = slice(index * n, (index + 1) * n)
        return self.key[at], self.value[at]

    @classmethod
    def after_hit(cls, sight: Sight, pages: list[tuple[torch.Tensor, torch.Tensor]]) -> ExactCache:
        new = cls(sight)
        new.key, new.value = (torch.cat(parts) for parts in zip(*pages, strict=True))
        return new

    def rewind(self, length: int) -> None:
        self.key, self.value = self.key[:length], self.value[:length]

    def step(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float = 0.0
    ) -> torch.Tensor:
        context = len(self.key)
        self.key = torch.cat([self.key, key]) if context else key
        self.value = torch.cat([self.value, value]) if context else value
        return self.share(query, scale, cap)

    def share(self, query: torch.Tensor, scale: float, cap: float = 0.0) -> torch.Tensor:
        context, group = len(self.key) - len(query), query.shape[1] // self.key.shape[1]
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (self.key, self.value))
        scores = capped(torch.einsum("qhd,thd->hqt", query.float(), k) * scale, cap)
        position = context + torch.arange(len(query))[:, None]
        behind = position - torch.arange(len(k))
        unseen = (behind < 0) | (behind >= self.sight.tokens(position))
        return _weigh(scores.masked_fill(unseen, float("-inf")), v, self.learned)


class StateCache:
    """The inputs of one request's layer with a state, from which the state follows."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(0)

    def page(self, index: int, n: int) -> torch.Tensor:
        return self.hidden[:, index * n : (index + 1) * n]

    @classmethod
    def after_hit(cls, pages: list[torch.Tensor]) -> StateCache:
        new = cls()
        new.hidden = torch.cat(pages, 1)
        return new

    def step(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """(1, tokens, hidden) of a chunk."""
        self.hidden = torch.cat([self.hidden, hidden], 1) if len(self.hidden) else hidden
        return mixer(self.hidden)[:, -hidden.shape[1] :]

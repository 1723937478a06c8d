"""The reference cache: what attention over a format must give, told by positions alone.

It knows no blocks, slots or batches: a request is a list of chunks, and token p is read in full precision if p < S or
p >= B, else through its packed unit, with

    B = max(floor((c - W) / P) * P, start)      for a chunk after c tokens

Kernels and the integration are compared with it, step by step. It is written to be read, not to be fast.
"""

from __future__ import annotations

import torch

from vllm_kvq.formats.page import PageFormat


class ReferenceCache:
    """One request's cache of one layer."""

    def __init__(self, fmt: PageFormat, heads: int, num_spec: int = 0) -> None:
        self.fmt, self.num_spec = fmt, num_spec
        self.start = 0
        self.state: torch.Tensor | None = None
        self.key = torch.zeros(0, heads, fmt.geometry.head_size)
        self.value = torch.zeros(0, heads, fmt.geometry.head_size)
        self.packed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Pack unit -> (P, H, head_size) keys and values as they are read back."""
        self.page_state: dict[int, torch.Tensor | None] = {}
        """Page -> the state it was begun with."""

    @classmethod
    def after_hit(cls, donor: ReferenceCache, length: int) -> ReferenceCache:
        """A new request whose first `length` tokens (whole pages) were found in the prefix cache, as `donor` left them.

        The last W of them are computed again; their pages stay as they are.
        """
        fmt = donor.fmt
        new = cls(fmt, donor.key.shape[1], donor.num_spec)
        new.start = length - fmt.W
        new.key, new.value = donor.key[: new.start].clone(), donor.value[: new.start].clone()
        # nothing but sinks may be read from here in full precision
        new.key[fmt.S :], new.value[fmt.S :] = float("nan"), float("nan")
        new.packed = {u: p for u, p in donor.packed.items() if (u + 1) * fmt.unit <= length}
        return new

    def rewind(self, length: int) -> None:
        """Forget rejected drafts."""
        self.key, self.value = self.key[:length], self.value[:length]

    def step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Append a chunk of q tokens and attend: query (q, Hq, head_size), key and value (q, H, head_size)."""
        context, new = len(self.key), len(key)
        self.key, self.value = torch.cat([self.key, key]), torch.cat([self.value, value])
        if self.fmt.state_rows and (new > 1 + self.num_spec or context == self.start):
            self._fit(query, key)
        self._pack(context)
        return self._attend(query, context, scale)

    def _fit(self, query: torch.Tensor, key: torch.Tensor) -> None:
        q, k = self.fmt.widen(query)[0], self.fmt.widen(key)[0]
        grouped = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 2)
        self.state = self.fmt.keys.fit(grouped, k.transpose(0, 1), self.state)

    def _pack(self, context: int) -> None:
        """Every unit that this chunk completes, but those that lie in the shared pages of a hit."""
        fmt, p = self.fmt, self.fmt.unit
        shared = (self.start + fmt.W) // p if self.start else 0
        for unit in range(max(context // p, shared), len(self.key) // p):
            at, page = slice(unit * p, (unit + 1) * p), unit * p // fmt.N
            if unit * p % fmt.N == 0 or page not in self.page_state:
                self.page_state[page] = self.state
            state = self.page_state[page] if fmt.keys.page_fields else self.state
            k, v = (fmt.widen(x[at])[0].transpose(0, 1) for x in (self.key, self.value))
            d = fmt.geometry.head_size
            self.packed[unit] = tuple(x.transpose(0, 1)[..., :d] for x in fmt.decode(fmt.encode(k, v, state)))  # type: ignore[assignment]

    def history(self, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens as a chunk after `context` tokens reads them."""
        fmt, p = self.fmt, self.fmt.unit
        boundary = max((context - fmt.W) // p * p, self.start, 0)
        key, value = self.key.float().clone(), self.value.float().clone()
        for position in range(fmt.S, boundary):
            unit, inner = divmod(position, p)
            key[position], value[position] = (x[inner] for x in self.packed[unit])
        return key, value

    def _attend(self, query: torch.Tensor, context: int, scale: float) -> torch.Tensor:
        key, value = self.history(context)
        group = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,thd->hqt", query.float(), k) * scale
        position = context + torch.arange(len(query))[:, None]
        scores = scores.masked_fill(torch.arange(len(k)) > position, float("-inf"))
        return torch.einsum("hqt,thd->qhd", scores.softmax(-1), v)

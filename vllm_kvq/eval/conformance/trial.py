"""A format bound to one head size, with two pages of one request's tokens, about which each check asks something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import Geometry, PageFormat
from vllm_kvq.formats.constants import Calibration
from vllm_kvq.formats.parts.fields import Packed
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.roundtrip import fitted, through_pages
from vllm_kvq.formats.table import DEFAULT_N, Format

HEADS, GROUP, PAGES = 2, 2, 2


@dataclass(frozen=True, eq=False)
class Trial:
    """Synthetic tokens: keys have wide and biased channels, as real ones have."""

    page: PageFormat
    query: torch.Tensor
    """(tokens, query heads, head_size) float32."""
    key: torch.Tensor
    """(tokens, KV heads, head_size) float32, that fill two pages."""
    value: torch.Tensor

    @classmethod
    def of(cls, fmt: Format, head_size: int, options: Mapping[str, Any] | None = None) -> Trial:
        """ValueError if the format refuses the head size."""
        block = fmt.settings(options).N or DEFAULT_N
        rope = Rope.plain(head_size, PAGES * block)
        page = fmt.bind(Geometry(head_size, block, torch.bfloat16, rope=rope), options)
        tokens = PAGES * block
        if page.calibrated:
            other = attention_data(head_size, tokens, HEADS, GROUP, rope=True, seed=1)
            page = page.calibrated_on(Calibration(*other, rope))
        return cls(page, *attention_data(head_size, tokens, HEADS, GROUP, rope=True))

    @property
    def heads(self) -> int:
        return self.key.shape[1]

    @cached_property
    def state(self) -> torch.Tensor | None:
        return fitted(self.page, self.key, self.query)

    def units(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_size) as `pack` takes it: (units * heads, T, d) float32, unit after unit."""
        wide = self.page.widen(x)[0]
        return wide.unflatten(0, (-1, self.page.unit)).transpose(1, 2).flatten(0, 1)

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> Packed:
        k, v = self.units(key), self.units(value)
        count = len(k) // self.heads
        state = None if self.state is None else self.state.repeat(count, 1, 1)
        position = (torch.arange(count) * self.page.unit).repeat_interleave(self.heads)
        return self.page.pack(k, v, state, None, position)

    @cached_property
    def fields(self) -> Packed:
        return self.pack(self.key, self.value)

    @cached_property
    def pool(self) -> torch.Tensor:
        """Two packed pages after page 0, which holds 0xFF: NaN, and indices out of range."""
        return self.written(self.fields)

    def written(self, fields: Packed) -> torch.Tensor:
        pool = torch.zeros(1 + PAGES, self.heads, self.page.record_bytes, dtype=torch.uint8)
        pool[0] = 0xFF
        per_page = self.page.N // self.page.unit
        unit = torch.arange(PAGES * per_page)
        self.page.write(pool, 1 + unit // per_page, unit % per_page, fields)
        return pool

    def errors(self) -> tuple[float, float]:
        """Relative errors of q . K and of V."""
        key, value = through_pages(self.page, self.key, self.value, self.state)
        return score_error(self.query, self.key, key), ((value - self.value).norm() / self.value.norm()).item()

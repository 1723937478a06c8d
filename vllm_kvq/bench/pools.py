"""Pools of packed pages of random data with outliers, for benchmarks and tests of kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.codec import Codec
from vllm_kvq.formats.constants import Calibration, Constants
from vllm_kvq.formats.parts.rope import Rope

CALIBRATION_TOKENS, CALIBRATION_SEED = 256, 1


def outlier_data(tokens: int, heads: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(heads, tokens, d) keys with outlier channels (some with a bias, as real ones) and values with outlier tokens."""
    rng = torch.Generator().manual_seed(seed)
    key, value = torch.randn(heads, tokens, d, generator=rng), torch.randn(heads, tokens, d, generator=rng)
    channels = torch.randperm(d, generator=rng)[: max(2, d // 24)]
    key[..., channels] = key[..., channels] * 6 + 8 * torch.randn(heads, 1, len(channels), generator=rng)
    tall = torch.rand(heads, tokens, 1, generator=rng) < 0.03
    return key, torch.where(tall, value * 30, value)


@functools.cache
def _fitted(codec: type[Codec], options: tuple[tuple[str, Any], ...], head_size: int, heads: int) -> torch.Tensor:
    data = outlier_data(CALIBRATION_TOKENS, heads, head_size, CALIBRATION_SEED)
    key, value = (x.transpose(0, 1) for x in data)
    # queries look at the keys' wide channels, as in real models
    noise = torch.randn(key.shape, generator=torch.Generator().manual_seed(CALIBRATION_SEED))
    query = (key + noise).repeat_interleave(2, 1)
    turned = slow_rope(head_size)
    key = turned.apply(key, torch.arange(len(key))[:, None])
    return codec.fit_constants(Calibration(query, key, value, turned), dict(options))


def slow_rope(head_size: int) -> Rope:
    """A RoPE that turns most channels, but so little that keys it has not turned are close to those it has."""
    half = (head_size - 16) // 2
    angle = torch.arange(CALIBRATION_TOKENS)[:, None] * 10 ** (-3 - torch.arange(half) / half)
    return Rope(torch.cat([angle.cos(), angle.sin()], 1))


def calibrated(fmt: PageFormat, heads: int) -> PageFormat:
    """The same format with constants for `heads` KV heads, no two of them alike; the format itself if it needs none."""
    if not fmt.calibrated:
        return fmt
    s, d = fmt.settings, fmt.geometry.head_size
    keys, values = (
        _fitted(codec, tuple(s.of_codec(codec).items()), d, heads) if codec.calibrated else None
        for codec in (s.keys, s.values)
    )
    return fmt.with_constants(Constants(keys, values))


def state_for(fmt: PageFormat, key: torch.Tensor, seed: int) -> torch.Tensor | None:
    """The state of a request whose prompt has these (heads, tokens, d) keys."""
    if not fmt.state_rows:
        return None
    queries = torch.randn(len(key), 64, key.shape[-1], generator=torch.Generator().manual_seed(seed + 1))
    return fmt.keys.fit(fmt.widen(queries)[0], fmt.widen(key)[0], None)


def pages_of(fmt: PageFormat, key: torch.Tensor, value: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Complete pages of one request's (heads, tokens, d) keys and values after page 0, which is all 0xFF: NaN and not
    packed."""
    heads, tokens, _ = key.shape
    state = state_for(fmt, key, seed)
    pool = torch.zeros(tokens // fmt.N + 1, heads, fmt.record_bytes, dtype=torch.uint8)
    units = tokens // fmt.unit
    k, v = (fmt.widen(x)[0].unflatten(1, (units, fmt.unit)).transpose(0, 1).flatten(0, 1) for x in (key, value))
    repeated = None if state is None else state.repeat(units, 1, 1)
    index = torch.arange(units)
    per_page = fmt.N // fmt.unit
    position = (index * fmt.unit).repeat_interleave(heads)
    fmt.write(pool, 1 + index // per_page, index % per_page, fmt.pack(k, v, repeated, position=position))
    pool[0] = 0xFF
    return pool


def random_pages(fmt: PageFormat, pages: int, heads: int, seed: int = 0) -> torch.Tensor:
    """`pages_of` random data with outliers."""
    return pages_of(fmt, *outlier_data(pages * fmt.N, heads, fmt.geometry.head_size, seed), seed)

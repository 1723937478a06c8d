"""Draws combinations from what the formats declare: an option added to a codec is drawn from then on."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from proof.options.case import DTYPES, Case
from vllm_kvq.formats import get_format
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.settings import COMMON
from vllm_kvq.formats.table import codec_options

BLOCK_SIZES = (32, 64, 64, 96, 128)
WINDOWS = (0, 32, 64)
SINKS = (0, 5, 32)
WIDE_RANGE = 64
"""A range whose ends differ by more than this factor is drawn by its logarithm."""


def draw(rng: Random, format_name: str, block_sizes: tuple[int, ...] = BLOCK_SIZES) -> Case:
    options: dict[str, Any] = {"W": rng.choice(WINDOWS), "S": rng.choice(SINKS)}
    fmt = get_format(format_name)
    if fmt.public and rng.random() < 0.3:
        options |= {option.name: rng.choice(option.choices) for option in codec_options() if rng.random() < 0.5}
    settings = fmt.settings(options)
    common = {option.name for option in COMMON}
    for option in (*settings.keys.options, *settings.values.options):
        if option.name not in common and rng.random() < 0.5:
            options[option.name] = value_of(rng, option)
    head_size = rng.choice(HEAD_SIZES)
    rotary = rng.choice((None, None, head_size // 2))
    block, dtype = rng.choice(block_sizes), rng.choice(list(DTYPES))
    return Case(format_name, head_size, block, dtype, options, rotary, rng.randrange(1 << 16))


def value_of(rng: Random, option: Option) -> Any:
    """One of the values that it takes; the ends of a range more often than others."""
    if option.choices:
        return rng.choice(option.choices)
    if rng.random() < 0.3:
        return _fitting(option, rng.choice((option.low, option.high)))
    if option.low > 0 and option.high / option.low >= WIDE_RANGE:
        return _fitting(option, math.exp(rng.uniform(math.log(option.low), math.log(option.high))))
    return _fitting(option, rng.uniform(option.low, option.high))


def _fitting(option: Option, x: float) -> Any:
    if not option.multiple:
        return min(option.high, max(option.low, x))
    low = math.ceil(option.low / option.multiple) * option.multiple
    return max(low, int(x) // option.multiple * option.multiple)

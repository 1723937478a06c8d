"""Known failures for a model, found from its weights before serving.

A codec declares whether large key biases spoil what it stores (`KeyCodec.hurt_by_biases`). What large means was
measured on Qwen2.5-Coder-0.5B (all layers, heads of 64 channels) and 1.5B (seven layers, 128), head by head, as the
standard deviation of the errors of scores before softmax, next to the norm of the head's bias divided by the head size:

    norm / head size    up to .51     .54        .62, .84      1.2 to 3.6    4.3 to 7.1
    int4_token          .2 to .8      .62        2.4, 4.1      1.0 to 3.3    8.1 to 30
    innerq2             .5 to 1.8     .98        7.9, 10       2.0 to 5.5    10 to 78
    kitty2              .2 to 1.0     .22        .7, 1.7       .2 to .5      .4 to 1.0

An error of 1 changes a token's weight by a factor of e. With the five layers of the 0.5B that exceed LARGE in 16 bits,
the KL of the model's predictions (96 tokens of one text, S = 4, W = 32) falls from 1.9 to .009 with int4_token, from
.43 to .039 with innerq2 and from 1.4 to .23 with qjl3; with two more layers (.3 and .51) int4_token has .008. The same
through vLLM:

    vllm-kvq eval MODEL --formats innerq2,innerq2:skip_layers=[0,1,2,4,8]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvq.formats.codec import KeyCodec
from vllm_kvq.formats.table import FORMATS, suite
from vllm_kvq.integration.advice.key_biases import of_model
from vllm_kvq.integration.plan.served import Served

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LARGE = 0.6
"""A bias is large from here on: its norm divided by the head size."""
FEW = 1 / 4
"""The largest part of the layers for which keeping them in 16 bits is a way out."""


def hints(served: Served, vllm_config: VllmConfig) -> list[str]:
    """For the start-up log and `vllm-kvq check`. A server is not refused for them."""
    if served.format.keys.hurt_by_biases is None:
        return []
    return bias_hints(served, of_model(vllm_config))


def large(biases: Mapping[int, float], head_size: int) -> set[int]:
    """The layers whose biases are large. `biases`: layer -> the largest norm of a head's, as in key_biases.py."""
    return {layer for layer, norm in biases.items() if norm > LARGE * head_size}


def bias_hints(served: Served, biases: Mapping[int, float]) -> list[str]:
    fmt = served.format  # all layers have the same codecs
    hurt = large(biases, fmt.geometry.head_size).intersection(served.layers.packed_layers)
    if fmt.keys.hurt_by_biases is None or not hurt:
        return []
    most = max(biases[layer] for layer in hurt)
    return [
        f"this model's key biases are large in {_layers(hurt)} (norm up to {most:.0f}), and {fmt.name} "
        f"is known to fail there, because it {fmt.keys.hurt_by_biases}; {_way_out(served, hurt)}"
    ]


def _way_out(served: Served, hurt: set[int]) -> str:
    other = next(name for name in suite("usual") if _unhurt(FORMATS[name].keys))
    if len(hurt) > FEW * served.layers.total:
        return f"use {other}"
    kept = sorted(hurt | served.layers.skipped)
    return f"use {other}, or keep these layers in 16 bits with the kvq option 'skip_layers': {kept}"


def _unhurt(keys: type[KeyCodec]) -> bool:
    """Whether any model can have such keys: its biases do no harm, and nothing is fitted to it."""
    return keys.hurt_by_biases is None and not keys.calibrated


def _layers(numbers: set[int]) -> str:
    *first, last = map(str, sorted(numbers))
    return f"layers {', '.join(first)} and {last}" if first else f"layer {last}"

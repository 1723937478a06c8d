"""What transformed keys' constants (formats/methods/klt.py) are to the Triton kernels, with a part for each KV head.

A query's numbers for the slots are a product with its head's matrix, which PyTorch computes once per step. CUDA graphs
hold the tables' addresses, so they are made when a layer's step is, and live as long as its codec.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.methods.klt import DIGIT, TransformedKeys
from vllm_kvq.formats.parts.fields import round_up

ALIGNED = 16
"""Numbers of a query are padded to a multiple of this."""


class Tables(NamedTuple):
    """H KV heads of d channels; float32 but for `places`."""

    query: torch.Tensor
    """(H, head size, slots + d, padded): a query's numbers for the slots, then for e (formats/parts/turning.py)."""
    forward: torch.Tensor
    """(H, 3 + 2 d, d): weight, step and largest code of the channels, then the transform of keys, row by row, then the
    mean by e."""
    back: torch.Tensor
    """(H, slots + d, d): what a slot's digit adds to a key, then the mean by e."""
    places: torch.Tensor
    """(H, slots) int32: channel 4 + digit of a slot."""
    turn: torch.Tensor
    """(FINE + COARSE, d): the tables of e."""


_made: WeakKeyDictionary[TransformedKeys, dict[torch.device, Tables]] = WeakKeyDictionary()


def _tables(keys: TransformedKeys, head_size: int, device: torch.device) -> Tables:
    t = keys.transform
    features = t.features[..., : keys.slots + keys.d]
    extra = round_up(features.shape[-1], ALIGNED) - features.shape[-1]
    made = Tables(
        pad(features[:, :head_size], (0, extra)),
        torch.cat([t.weight, t.step, t.most, t.forward, t.mean], 1),
        features.mT,
        (t.channel * 2**DIGIT + t.digit).int(),
        torch.cat(t.turning.tables()),
    )
    return Tables(*(x.to(device).contiguous() for x in made))


def tables(fmt: PageFormat, heads: int, device: torch.device) -> Tables | None:
    """None for keys that are not transformed. ValueError without constants for these heads: nothing can be packed or
    read."""
    if not isinstance(fmt.keys, TransformedKeys):
        return None
    by_device = _made.setdefault(fmt.keys, {})
    if device not in by_device:
        by_device[device] = _tables(fmt.keys, fmt.geometry.head_size, device)
    made = by_device[device]
    if len(made.places) != heads:
        raise ValueError(f"{fmt.name} has constants of {len(made.places)} KV heads, but pages have {heads}")
    return made


def features(query: torch.Tensor, of: Tables) -> torch.Tensor:
    """(..., query heads, head size) -> (..., query heads, numbers), float32."""
    heads = len(of.query)
    by_head = query.float().unflatten(-2, (heads, -1)).movedim(-3, 0)
    found = by_head.flatten(1, -2) @ of.query
    return found.unflatten(1, by_head.shape[1:-1]).movedim(0, -3).flatten(-3, -2)

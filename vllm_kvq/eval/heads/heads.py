"""The errors of each KV head of each layer relative to the 16-bit cache, for one format.

The cache is that of a decode step after a prompt, from the format's own reference: packed, except the newest W tokens
and the first S. It is read by queries that the format has not seen, those of the text's last tokens. There are three
relative errors: of the scores q . K, of the values, and of attention's output, which combines both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.eval.heads.synthetic import scores
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.by_layer import options_at, schedules
from vllm_kvq.formats.roundtrip import fitted, through_pages

READERS = 64
"""Tokens at the end of the text whose queries read the cache of the earlier tokens."""
BLOCK = 128
"""Tokens of a page that is measured."""


@dataclass(frozen=True)
class HeadError:
    layer: int
    head: int
    score: float
    value: float
    output: float


def bound(captured: Captured, layer: Layer, name: str, options: Mapping[str, Any], block: int) -> PageFormat:
    """The format bound to this layer. ValueError if that is impossible."""
    everywhere, options = options, options_at(options, layer.index)
    fmt, settings = get_format(name), get_format(name).settings(options)
    geometry = Geometry(layer.head_size, settings.N or block, layer.key.dtype, layer.index)
    if settings.keys.pairs_channels:
        if captured.pairing is None:
            raise ValueError(f"{name} needs to know which channels RoPE rotates together, and this model does not say")
        geometry = replace(geometry, pairing=captured.pairing, rotary_dim=captured.rotary_dim)
    page = fmt.bind(geometry, options)
    if page.calibrated:
        return captured.calibrated(page, layer, everywhere)
    if not page.keys.before_rope:
        return page
    if captured.rope is None:
        raise ValueError(f"{name} takes RoPE off keys, and this model has none, or several kinds")
    return fmt.bind(replace(geometry, rope=captured.rope), options)


def as_cached(
    page: PageFormat, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Keys and values of a prompt as the decode step after it reads them."""
    ends = [max(0, (len(key) - window) // page.unit * page.unit) for window in (page.W_keys, page.W)]
    hats = key.clone(), value.clone()
    if max(ends) > page.S:
        state = fitted(page, key, query)
        read = through_pages(page, key[: max(ends)], value[: max(ends)], state)
        for hat, x, end in zip(hats, read, ends, strict=True):
            hat[page.S : end] = x[page.S : end]
    return hats


def layer_errors(page: PageFormat, layer: Layer) -> list[HeadError]:
    """One set of errors for each KV head. The text must be longer than `READERS`."""
    context = len(layer.key) - READERS
    if context <= 0:
        raise ValueError(
            f"a text of {len(layer.key)} tokens is too short: its last {READERS} tokens read the others' cache"
        )
    least = min(page.W, page.W_keys) + (page.S // page.unit + 1) * page.unit
    if context < least:
        raise ValueError(
            f"{page.name} packs none of a text of {len(layer.key)} tokens, because its window, its sinks and the "
            f"last {READERS} tokens, which read the cache, take up all of it; it takes at least {least + READERS}"
        )
    query, key, value = layer.query[:context], layer.key[:context], layer.value[:context]
    key_hat, value_hat = as_cached(page, query, key, value)
    readers = layer.query[context:]
    exact, read = (scores(readers, k).flatten(1, 2) for k in (key, key_hat))
    v, v_hat = (x.double().transpose(0, 1) for x in (value, value_hat))
    output, output_hat = ((s * layer.scale).softmax(-1) @ x for s, x in ((exact, v), (read, v_hat)))
    halves = ((exact, read), (v, v_hat), (output, output_hat))
    found = [[_relative(a[head], b[head]) for a, b in halves] for head in range(key.shape[1])]
    return [HeadError(layer.index, head, *errors) for head, errors in enumerate(found)]


def _relative(exact: torch.Tensor, other: torch.Tensor) -> float:
    return ((other - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def head_errors(captured: Captured, name: str, options: Mapping[str, Any]) -> list[HeadError]:
    """The errors of every layer that would be packed; others have no error."""
    packed = packed_layers(captured, name, options)
    found = []
    for layer in captured.layers:
        if layer.index in packed:
            found += layer_errors(bound(captured, layer, name, options, BLOCK), layer)
        else:
            found += [HeadError(layer.index, head, 0.0, 0.0, 0.0) for head in range(layer.key.shape[1])]
    return found


def packed_layers(captured: Captured, name: str, options: Mapping[str, Any]) -> set[int]:
    """The layers that the options don't exclude from packing. ValueError if options name layers that do not exist."""
    packed = {layer.index for layer in captured.layers}
    packed -= get_format(name).settings(options_at(options, None)).skipped(captured.count)
    for schedule in schedules(options):
        schedule.check(packed, captured.count)
    return packed

"""Attention among a piece's tokens, in the place of every layer's own implementation while constants are fitted.

There is no cache yet, and no step of vLLM's scheduler: a piece's tokens see each other and nothing else. What packed
layers are given is summed up in passing, so that the text's queries and keys need not be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from vllm_kvq.formats.constants import Moments
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.turning import Turning
from vllm_kvq.kernels.torch.attend import attend_raw, with_learned


class Attending:
    """In the place of one layer's implementation."""

    def __init__(
        self, layer: Any, turning: Turning, skipped: int, kept: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """`turning`: that of the layer's keys. `skipped`: a piece's first tokens that are never packed. `kept`: keys
        and values by layer, for those layers that share them."""
        self.turning = turning
        self.own, self.skipped, self.kept = layer.impl, skipped, kept
        self.window = getattr(layer, "sliding_window", None)
        self.name, self.target = layer.layer_name, getattr(layer, "kv_sharing_target_layer_name", None)
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        """(pieces, tokens) of the pass."""
        self.moments: Moments | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.target is not None:
            key, value = self.kept[self.target]
        self.kept[self.name] = key, value
        shape = (*self.positions.shape, -1, layer.head_size)
        q, k, v = (x.view(shape) for x in (query, key, value))
        if self.target is None:
            at = self.positions[:, self.skipped :].flatten()
            phases = self.turning.phases(at // SLAB)
            found = Moments.of(q[:, self.skipped :].flatten(0, 1), k[:, self.skipped :].flatten(0, 1), phases)
            self.moments = found if self.moments is None else self.moments + found
        length = shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        cap = getattr(self.own, "cap", None) or getattr(self.own, "logits_soft_cap", None) or 0.0
        learned = getattr(self.own, "learned", None)
        sinks = learned if learned is not None else getattr(self.own, "sinks", None)
        part = attend_raw(q, k, v, seen.expand(len(q), -1, -1), float(self.own.scale), float(cap))
        out, _ = with_learned(part, sinks)
        return output.view(len(query), -1).copy_(out.flatten(0, 1).flatten(1))


@contextmanager
def attending(
    layers: Mapping[str, Any], turned: Callable[[str], Turning], skipped: int
) -> Iterator[dict[str, Attending]]:
    """All attention layers attend like this. `layers` are vLLM's, by name; `turned`: how a layer's keys are turned."""
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    found = {
        name: Attending(layer, turned(name), skipped, kept) for name, layer in layers.items() if hasattr(layer, "impl")
    }
    before = {name: layers[name].impl for name in found}
    try:
        for name, stand_in in found.items():
            layers[name].impl = stand_in
        yield found
    finally:
        for name, own in before.items():
            layers[name].impl = own

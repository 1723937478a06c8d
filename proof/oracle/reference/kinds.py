"""How vLLM runs a model, read from its configuration: what layers that stay in its own cache see, and the order of
channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sight:
    """How far back a token of such a layer sees: over all tokens, a window of the newest, or the rest of its chunk."""

    window: int | None = None
    chunk: int | None = None

    def tokens(self, position: torch.Tensor) -> torch.Tensor:
        """How many tokens the ones at these positions see, themselves included."""
        if self.chunk is not None:
            return position % self.chunk + 1
        return position + 1 if self.window is None else (position + 1).clamp_max(self.window)


def exact_layers(config: Any, skipped: Iterable[int] = ()) -> Mapping[int, Sight]:
    """The layers that stay in vLLM's own cache under a low-bit format: those that a Transformers configuration gives a
    window or chunks, and `skipped`."""
    kinds = getattr(config, "layer_types", None) or []
    # vLLM: Cohere's layers see one token more than their configuration says
    more = config.model_type == "cohere2"
    found = {layer: Sight() for layer in skipped}
    found |= {i: Sight(window=config.sliding_window + more) for i, kind in enumerate(kinds) if "sliding" in kind}
    return found | {i: Sight(chunk=config.attention_chunk_size) for i, kind in enumerate(kinds) if "chunked" in kind}


def in_vllms_order(config: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries or keys with their channels, the last dimension, as vLLM has them.

    RoPE rotates neighbours in Transformers' Llama 4; vLLM orders the weights so that it rotates the two halves.
    """
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2) if config.model_type == "llama4_text" else x

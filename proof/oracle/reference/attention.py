"""Our object in place of a Transformers model's attention, and around its layers that keep a state.

Transformers calls one function for every layer of every model and does not say on whose behalf. The thread that runs
the model knows, so the object is a variable of the thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from proof.oracle.reference.kinds import in_vllms_order

NAME = "kvq_reference"


Mixer = Callable[[torch.Tensor], torch.Tensor]
"""A layer with a state (Mamba-2) over (1, tokens, hidden) of one request, from its first token on."""


class Attention(Protocol):
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        cap: float = 0.0,
        learned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(tokens, heads, head_size) queries, keys and values, with RoPE applied -> outputs shaped as the queries.
        `cap`: the soft cap of scores; 0: none. `learned`: (heads,) scores of a token whose value is 0 (gpt-oss)."""

    def mix(self, layer: int, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """(1, tokens, hidden) -> the same, computed by `mixer` from nothing but each request's tokens."""


class _Thread(threading.local):
    attention: Attention | None = None


_thread = _Thread()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: (1, heads, tokens, head_size) each."""
    assert _thread.attention is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k = (in_vllms_order(module.config, x) for x in (q, k))
    out = _thread.attention.attend(module.layer_idx, q, k, v, scaling, softcap or 0.0, s_aux)
    return out[None].to(query.dtype), None


def _mix(layer: int, mixer: Mixer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    assert _thread.attention is not None
    return _thread.attention.mix(layer, mixer, hidden_states)


def load(path: str) -> Any:
    """A checkpoint in float32, which may be called within `attending` only."""
    import transformers

    transformers.AttentionInterface.register(NAME, _attend)
    (name,) = transformers.AutoConfig.from_pretrained(path).architectures
    # an encoder of images attends as Transformers has it
    parts = {"": NAME, "text_config": NAME, "vision_config": "eager"}
    network = getattr(transformers, name).from_pretrained(path, dtype=torch.float32, attn_implementation=parts)
    for module in network.modules():
        if hasattr(module, "A_log"):  # Mamba-2
            module.forward = functools.partial(_mix, module.layer_idx, module.forward)
    return network


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Models that this thread calls from here on attend with `attention`."""
    _thread.attention = attention
    try:
        yield
    finally:
        _thread.attention = None

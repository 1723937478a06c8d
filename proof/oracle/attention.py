"""An object of ours in the place of a Transformers model's attention.

Transformers calls one function for every layer of every model and does not say on whose behalf. The thread that runs
the model knows, so the object is a variable of the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

NAME = "kvq_reference"


class Attention(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, cap: float
    ) -> torch.Tensor:
        """(tokens, heads, head_size) queries, keys and values, with RoPE applied -> outputs shaped as the queries.
        `cap`: the soft cap of scores; 0: none."""


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: (1, heads, tokens, head_size) each."""
    assert _thread.attention is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _thread.attention.attend(module.layer_idx, q, k, v, scaling, softcap or 0.0)[None].to(query.dtype), None


def load(path: str) -> Any:
    """A checkpoint in float32, which may be called within `attending` only."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, _attend)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME)


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Models that this thread calls from here on attend with `attention`."""
    _thread.attention = attention
    try:
        yield
    finally:
        _thread.attention = None

"""Layers with a sliding window or chunked local attention (Llama 4) beside packed ones: they keep 16 bits, in pages of
fewer tokens.

A page of theirs takes as much memory as those of several packed layers. Of as many tokens few would fit into a block of
the pool, in groups of their own each, and the rest of each block would be wasted (`Served.window_block`).

A token of a layer with chunks sees its own chunk up to itself, which a window of a chunk's length always holds, so vLLM
plans them as windows. It frees what has left a window, cuts window layers into groups that are no wider than the packed
one, and finds them again by prefix caching. It can't cut chunked ones: each block of the pool would be as wide as all
of them together. The price: a hit that ends where a chunk ends would need nothing of the chunk, and here needs the
window before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.attention import Attention, chunked_local_attention
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_kvq.formats import FORMATS


def cut_windows(window_block: Callable[[Any], int | None]) -> None:
    """Once, where `window_block(vllm_config)` says how many tokens a page of such a layer has; None: not our format."""
    chunked, ask = chunked_local_attention.ChunkedLocalAttention, chunked_local_attention.get_attn_backend
    window_spec, chunk_spec = Attention.get_kv_cache_spec, chunked.get_kv_cache_spec
    if getattr(window_spec, "_kvq", False):
        return

    @functools.wraps(window_spec)
    def of_window(self: Any, vllm_config: Any) -> Any:
        spec = window_spec(self, vllm_config)
        block = window_block(vllm_config) if isinstance(spec, SlidingWindowSpec) else None
        return spec if block is None else replace(spec, block_size=block)

    @functools.wraps(ask)
    def get_attn_backend(head_size: int, dtype: Any, kv_cache_dtype: str) -> Any:
        # it asks before it looks at the list of layers to skip
        return ask(head_size, dtype, "auto" if kv_cache_dtype in FORMATS else kv_cache_dtype)

    @functools.wraps(chunk_spec)
    def of_chunks(self: Any, vllm_config: Any) -> Any:
        spec, block = chunk_spec(self, vllm_config), window_block(vllm_config)
        if block is None:
            return spec
        fields = {name: getattr(spec, name) for name in ("num_kv_heads", "head_size", "dtype")}
        return SlidingWindowSpec(**fields, block_size=block, sliding_window=self.attention_chunk_size)

    of_window._kvq = True  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec, chunked.get_kv_cache_spec = of_window, of_chunks
    chunked_local_attention.get_attn_backend = get_attn_backend

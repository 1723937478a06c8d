"""Layers with chunked local attention (Llama 4) beside packed ones: they keep 16 bits, and vLLM plans them as windows.

A token of such a layer sees its own chunk up to itself, which a window of a chunk's length always holds. vLLM frees
what has left a window, cuts window layers into groups that are no wider than the packed one, and finds them again by
prefix caching. It can't cut chunked ones: each block of the pool would be as wide as all of them together. The price: a
hit that ends where a chunk ends would need nothing of the chunk, and here needs the window before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_kvq.formats import FORMATS


def keep_chunks(ours: Callable[[Any], bool]) -> None:
    """Where `ours(vllm_config)`, once."""
    layer, ask = chunked_local_attention.ChunkedLocalAttention, chunked_local_attention.get_attn_backend
    spec_of = layer.get_kv_cache_spec
    if getattr(spec_of, "_kvq", False):
        return

    @functools.wraps(ask)
    def get_attn_backend(head_size: int, dtype: Any, kv_cache_dtype: str) -> Any:
        # it asks before it looks at the list of layers to skip
        return ask(head_size, dtype, "auto" if kv_cache_dtype in FORMATS else kv_cache_dtype)

    @functools.wraps(spec_of)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = spec_of(self, vllm_config)
        if not ours(vllm_config):
            return spec
        fields = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
        return SlidingWindowSpec(**fields, sliding_window=self.attention_chunk_size)

    get_kv_cache_spec._kvq = True  # type: ignore[attr-defined]
    chunked_local_attention.get_attn_backend, layer.get_kv_cache_spec = get_attn_backend, get_kv_cache_spec

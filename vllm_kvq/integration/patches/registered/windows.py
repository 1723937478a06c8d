"""Layers with a sliding window or chunked local attention (Llama 4) keep 16 bits, in pages of fewer tokens than packed
layers have.

A page of theirs takes as much memory as those of several packed layers. If it held as many tokens as a packed page,
only a few would fit into a block of the pool, each in a group of its own, and the rest of the block would be wasted
(`Served.window_block`).

A token of a layer with chunks sees its own chunk up to itself, which a window of a chunk's length always holds, so vLLM
plans them as windows. It frees what has left a window, cuts window layers into groups that are no wider than the packed
one, and finds them again by prefix caching. It can't cut chunked ones: each block of the pool would be as wide as all
of them together. The price: a hit that ends where a chunk ends would need nothing of the chunk, and here needs the
window before it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Hooks, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPEC = "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec"
CHUNKED = "vllm.model_executor.layers.attention.chunked_local_attention"
CHUNK_SPEC = f"{CHUNKED}:ChunkedLocalAttention.get_kv_cache_spec"
CHUNK_BACKEND = f"{CHUNKED}:get_attn_backend"


def cut_windows(hooks: Hooks) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    def make(window_spec: Any) -> Any:
        @functools.wraps(window_spec)
        def of_window(self: Any, vllm_config: VllmConfig) -> Any:
            spec = window_spec(self, vllm_config)
            block = hooks.window_block(vllm_config) if isinstance(spec, SlidingWindowSpec) else None
            return spec if block is None else replace(spec, block_size=block)

        return of_window

    once(SPEC, make)


def plan_chunks_as_windows(hooks: Hooks) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    def make_backend(ask: Any) -> Any:
        @functools.wraps(ask)
        def get_attn_backend(head_size: int, dtype: Any, kv_cache_dtype: str) -> Any:
            # it asks before it looks at the list of layers to skip
            return ask(head_size, dtype, "auto" if kv_cache_dtype in FORMATS else kv_cache_dtype)

        return get_attn_backend

    def make_spec(chunk_spec: Any) -> Any:
        @functools.wraps(chunk_spec)
        def of_chunks(self: Any, vllm_config: VllmConfig) -> Any:
            spec, block = chunk_spec(self, vllm_config), hooks.window_block(vllm_config)
            if block is None:
                return spec
            fields = {name: getattr(spec, name) for name in ("num_kv_heads", "head_size", "dtype")}
            return SlidingWindowSpec(**fields, block_size=block, sliding_window=self.attention_chunk_size)

        return of_chunks

    once(CHUNK_SPEC, make_spec)
    once(CHUNK_BACKEND, make_backend)


WINDOWS = Patch(
    what="Attention.get_kv_cache_spec wrapped",
    why="pages of a window have as many tokens as packed ones, and would leave most of a block unused",
    until="a model's windows may have a block size of their own",
    needs=(SPEC, "vllm.v1.kv_cache_interface:SlidingWindowSpec"),
    install=cut_windows,
    replaces=(SPEC,),
)
CHUNKS = Patch(
    what="ChunkedLocalAttention.get_kv_cache_spec and the get_attn_backend of its module wrapped",
    why="it asks for a backend of the whole model's dtype, and groups of such layers can't be cut; windows can",
    until="it looks at the list of skipped layers, and its groups are cut",
    needs=(CHUNK_SPEC, CHUNK_BACKEND, "vllm.v1.kv_cache_interface:SlidingWindowSpec"),
    install=plan_chunks_as_windows,
    replaces=(CHUNK_SPEC, CHUNK_BACKEND),
)

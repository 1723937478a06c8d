"""Layers that stay in vLLM's own cache beside packed ones: sliding windows, the user's `skip_layers`, drafts.

vLLM's pool has pages of one size. 16-bit layers take the largest block that fits into one of our pages and are padded
to it (vLLM's own mechanism for `kv_cache_dtype_skip_layers`); where our page is too small for their smallest block, our
block grows. The memory of window layers does not grow with the context; that of skipped layers does.

Beside window layers and skipped ones prefix caching is off: a hit computes our window again, and for its first tokens
the window layers would need keys from before the hit's own window, which vLLM does not keep; skipped layers would write
what they computed from packed history into pages that others read. A draft's pages may be shared: they decide what is
guessed and not what is answered.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.settings import BLOCK
from vllm_kvq.formats.table import DEFAULT_N
from vllm_kvq.integration.drafts import draft_token_bytes
from vllm_kvq.integration.setup import kvq_options

logger = init_logger("vllm.kvq")
WINDOWS = "sliding_window"
"""What vLLM's list of layers to skip calls them."""
SMALLEST_BLOCK = 32
"""The smallest block of vLLM's CPU attention."""


def fitting_block(page: int, token_bytes: int, divides: int | None = None) -> int:
    """The most tokens of a 16-bit layer that fit into one of our pages, if wanted a divisor of our block size."""
    largest = page // token_bytes // SMALLEST_BLOCK * SMALLEST_BLOCK
    if divides is None:
        return largest
    return max(b for b in range(SMALLEST_BLOCK, largest + 1, SMALLEST_BLOCK) if divides % b == 0)


def window_problem(model: Any) -> str | None:
    """What stands against serving this model's window layers beside packed ones; None: nothing."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    sliding = [kind for kind in kinds if "sliding" in kind]
    if model.get_sliding_window() is None and not sliding:
        return None
    if not sliding or len(sliding) == len(kinds):
        return "models in which all layers have sliding-window attention"
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "sliding-window attention on this platform"
    return None


def window_layers(model: Any) -> int:
    """How many layers have a sliding window."""
    return sum("sliding" in kind for kind in getattr(model.hf_text_config, "layer_types", None) or ())


def kept_layers(vllm_config: Any) -> set[str]:
    """What stays in 16 bits, in vLLM's words: layer indices and WINDOWS."""
    windows = {WINDOWS} if window_layers(vllm_config.model_config) else set()
    chosen = {str(i) for i in kvq_options(vllm_config).get("skip_layers", ())}
    return windows | chosen | {*vllm_config.cache_config.kv_cache_dtype_skip_layers}


def keep_sixteen_bits(vllm_config: Any) -> None:
    """Let those layers keep 16 bits, in pages of our size. Raises ValueError if the user's block size is too small."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    kept, draft = kept_layers(vllm_config), draft_token_bytes(vllm_config)
    if not kept and not draft:
        return
    layers = model.get_total_num_hidden_layers()
    if beyond := sorted(i for i in kept if i.isdigit() and int(i) >= layers):
        raise ValueError(f"option 'skip_layers' names layer {beyond[0]}; the model has layers 0 to {layers - 1}")
    heads, head_size = model.get_num_kv_heads(vllm_config.parallel_config), model.get_head_size()
    plain = SMALLEST_BLOCK * max(draft, 2 * heads * head_size * model.dtype.itemsize if kept else 0)
    block = cache.block_size or DEFAULT_N
    fitting = block
    while (page := _page(vllm_config, heads, head_size, fitting, model.dtype)) < plain:
        fitting *= 2
        if fitting > BLOCK.high:
            raise ValueError(f"no block of up to {BLOCK.high:g} tokens holds {SMALLEST_BLOCK} tokens in 16 bits")
    if fitting != block and cache.user_specified_block_size:
        beside = "layers in 16 bits" if kept else "the draft's layers in 16 bits"
        raise ValueError(f"block size {block} is too small beside {beside}; set --block-size {fitting}")
    if kept and cache.enable_prefix_caching:
        logger.warning_once("kvq: prefix caching is switched off: some layers stay in 16 bits")
        cache.enable_prefix_caching = False
    cache.block_size = fitting
    cache.skip_page_size_padded = page
    cache.kv_cache_dtype_skip_layers = sorted(kept)


def _page(vllm_config: Any, heads: int, head_size: int, block: int, dtype: torch.dtype) -> int:
    fmt = get_format(vllm_config.cache_config.cache_dtype).bind(
        Geometry(head_size, block, dtype), kvq_options(vllm_config)
    )
    return heads * fmt.record_bytes

"""Models that mix full attention with sliding windows: the window layers stay in vLLM's own 16-bit cache.

vLLM's pool has pages of one size. Window layers take the largest block that fits into one of our pages and are padded
to it (vLLM's own mechanism for `kv_cache_dtype_skip_layers`); where our page is too small for their smallest block, our
block grows. Their memory does not grow with the context, ours is what a long context costs.

Prefix caching is off for these models: a hit computes our window again, and for its first tokens the window layers
would need keys from before the hit's own window, which vLLM does not keep.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.settings import OPTIONS
from vllm_kvq.formats.table import DEFAULT_N
from vllm_kvq.integration.setup import kvq_options

logger = init_logger("vllm.kvq")
WINDOWS = "sliding_window"
"""What vLLM's list of layers to skip calls them."""
SMALLEST_BLOCK = 32
"""The smallest block of vLLM's CPU attention."""


def window_problem(model: Any) -> str | None:
    """What stands against serving this model's window layers beside packed ones; None: nothing."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    sliding = [kind for kind in kinds if "sliding" in kind]
    if model.get_sliding_window() is None and not sliding:
        return None
    if not sliding or len(sliding) == len(kinds):
        return "models in which all layers have sliding-window attention"
    if (
        len({size for name in ("head_dim", "global_head_dim") if (size := getattr(model.hf_text_config, name, None))})
        > 1
    ):
        return "head sizes that differ per layer"
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "sliding-window attention on this platform"
    return None


def keep_windows(vllm_config: Any) -> None:
    """Let window layers keep 16 bits, in pages of our size. Raises ValueError if the user's block size is too small."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    if not any("sliding" in kind for kind in kinds):
        return
    heads, head_size = model.get_num_kv_heads(vllm_config.parallel_config), model.get_head_size()
    plain = SMALLEST_BLOCK * 2 * heads * head_size * model.dtype.itemsize
    block = cache.block_size or DEFAULT_N
    fitting = block
    while (page := _page(vllm_config, heads, head_size, fitting, model.dtype)) < plain:
        fitting *= 2
        if fitting > OPTIONS["N"].high:
            raise ValueError(f"no block of up to {OPTIONS['N'].high:g} tokens holds {SMALLEST_BLOCK} tokens in 16 bits")
    if fitting != block and cache.user_specified_block_size:
        raise ValueError(
            f"block size {block} is too small beside this model's sliding-window layers; set --block-size {fitting}"
        )
    if cache.enable_prefix_caching:
        logger.warning_once("kvq: prefix caching is switched off: this model has sliding-window layers")
        cache.enable_prefix_caching = False
    cache.block_size = fitting
    cache.skip_page_size_padded = page
    cache.kv_cache_dtype_skip_layers = sorted({*cache.kv_cache_dtype_skip_layers, WINDOWS})


def _page(vllm_config: Any, heads: int, head_size: int, block: int, dtype: torch.dtype) -> int:
    fmt = get_format(vllm_config.cache_config.cache_dtype).bind(
        Geometry(head_size, block, dtype), kvq_options(vllm_config)
    )
    return heads * fmt.record_bytes

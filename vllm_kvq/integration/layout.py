"""How vLLM lays out a pool that layers of several kinds share: their pages lie side by side in each of its blocks.

With the layers' dimension inside of the blocks' (BLHNC) vLLM needs pages of one size neither by padding nor by larger
blocks. It then wraps the layers of a group in one spec, which two of its places overlook that are mended here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_layout import KVCacheLayout

ONE_SIZE = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
"""What packed layers take when they are alone: all pages have one size."""
SIDE_BY_SIDE = (KVCacheLayout.BLHNC,)


def put_first(name: str, layers: dict[str, Any]) -> None:
    """Make this packed layer the first of all.

    vLLM puts all layers with full attention into one KV cache group, whose first layer decides which manager it has
    and, by its dtype, whether new blocks are zeroed. It also is the group whose block table a draft model gets.
    """
    for other in [n for n in layers if n != name]:
        layers[other] = layers.pop(other)


def smallest_first(names: list[str], layers: dict[str, Any]) -> None:
    """Put these layers, companions of one kind, last and in the order of their pages' sizes.

    vLLM would divide a group of companions in two if as many pages of the first one's size as it has layers did not fit
    into a block of the pool. The smallest always do.
    """
    for name in sorted(names, key=lambda name: layers[name].page_size_bytes):
        layers[name] = layers.pop(name)


def zero_all_groups() -> None:
    """Have vLLM's CPU runner zero new blocks in wrapped groups, too, once; a GPU's runner does.

    A block is handed from one group to another, and what a window layer finds behind a request's end, though it is
    weighed with 0, must not be NaN.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    zero = CPUModelRunner._zero_block_ids
    if getattr(zero, "_kvq", False):
        return

    @functools.wraps(zero)
    def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
        zero(self, block_ids)
        for group in self.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            if not isinstance(spec, UniformTypeKVCacheSpecs) or not isinstance(spec.first_spec, AttentionSpec):
                continue
            for name in group.layer_names:
                self.compilation_config.static_forward_context[name].kv_cache[block_ids] = 0

    _zero_block_ids._kvq = True  # type: ignore[attr-defined]
    CPUModelRunner._zero_block_ids = _zero_block_ids


def keep_pages_apart(ours: Callable[[Any], bool]) -> None:
    """Keep vLLM from padding pages to one size, and from choosing a block for that, where `ours(vllm_config)`."""
    from vllm.platforms import current_platform

    cls = type(current_platform)
    for name in ("_align_heterogeneous_kv_block_size", "_align_hybrid_block_size"):
        align = getattr(cls, name)
        if not getattr(align, "_kvq", False):
            setattr(cls, name, classmethod(_unless(ours, align.__func__)))


def _unless(ours: Callable[[Any], bool], align: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(align)
    def aligned(c: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not ours(vllm_config):
            align(c, vllm_config, *args, **kwargs)

    aligned._kvq = True  # type: ignore[attr-defined]
    return aligned

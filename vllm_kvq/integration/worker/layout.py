"""How vLLM lays out a pool that layers of several kinds share: their pages lie side by side in each of its blocks.

With the layers' dimension inside the blocks' (BLHNC) vLLM needs neither padding nor larger blocks to make pages equal
in size. It then wraps the layers of a group in one spec, which some of its functions overlook: zeroing.py,
shared_caches.py and states.py in patches/served mend them. patches/registered/page_sizes.py keeps it from padding all
the same.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_layout import KVCacheLayout

ONE_SIZE = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
"""What packed layers take when there are no others: all pages have one size."""
SIDE_BY_SIDE = (KVCacheLayout.BLHNC,)


def put_first(name: str, layers: dict[str, Any]) -> None:
    """Make this packed layer the first of all.

    vLLM puts all layers with full attention into one KV cache group, whose first layer decides which manager it has
    and, by its dtype, whether new blocks are zeroed. It is also the group whose block table a draft model gets.
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

"""Pages of several sizes stay as they are.

vLLM pads the pages of layers in 16 bits, states and packed layers to one size, or chooses a block size for all of them.
Side by side in the blocks of the pool (layout.py) they need neither.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Hooks, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAMES = (
    "vllm.platforms:current_platform._align_heterogeneous_kv_block_size",
    "vllm.platforms:current_platform._align_hybrid_block_size",
)


def keep_pages_apart(hooks: Hooks) -> None:
    def make(align: Any) -> Any:
        @functools.wraps(align)
        def aligned(c: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
            if not hooks.serves(vllm_config):
                align(c, vllm_config, *args, **kwargs)

        return aligned

    for name in NAMES:
        once(name, make)


APART = Patch(
    what="Platform._align_heterogeneous_kv_block_size and _align_hybrid_block_size wrapped",
    why="they pad the pages of skipped layers, states and packed layers to one size; side by side they need none",
    until="they ask for the layout first",
    needs=NAMES,
    install=keep_pages_apart,
    replaces=NAMES,
)

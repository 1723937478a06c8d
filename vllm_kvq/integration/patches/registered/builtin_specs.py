"""vLLM's own cache specs are registered before ours.

vLLM registers its builtin specs the first time that it looks a spec up, but only if its registry is empty. Ours would
be in it by then, and vLLM's own never.
"""

from __future__ import annotations

from vllm_kvq.integration.patches.patch import Hooks, Patch


def ensure_builtin_specs(_: Hooks) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    if not _are_registered():
        register_all_kvcache_specs(None)


def _are_registered() -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

    return FullAttentionSpec in _REGISTRY_KVCACHESPEC_LIST


BUILTIN = Patch(
    what="builtin specs registered first",
    why="KVCacheSpecRegistry skips its builtin ones when it is not empty",
    until="the registry merges builtin and registered specs",
    needs=(
        "vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs",
        "vllm.v1.kv_cache_spec_registry:_REGISTRY_KVCACHESPEC_LIST",
    ),
    install=ensure_builtin_specs,
    active=_are_registered,
)

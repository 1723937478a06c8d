"""The cache specs that vLLM collects from a model's layers, without the model, and the pool that it plans for them."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

from vllm_kvq.integration.plan.served import Served


def specs(vllm_config: Any, served: Served, kinds: str) -> dict[str, Any]:
    """What vLLM's model runner collects from the layers of a model whose weights are loaded."""
    from vllm.model_executor.layers.attention import Attention

    from vllm_kvq.integration.worker.backend import bound_backend
    from vllm_kvq.integration.worker.companions import SIDECAR_SUFFIX, SINK_SUFFIX, Sidecar, Sinks
    from vllm_kvq.integration.worker.layout import put_first, smallest_first
    from vllm_kvq.integration.worker.side_by_side import SideBySideBackend

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = {}
    for i, kind in enumerate(kinds):
        if kind == "m":
            found[f"layers.{i}.{kind}"] = state_spec(vllm_config)
            continue
        part = next((part for part in served.parts if i in part.layers), served.parts[0])
        of, how, arch = model, parallel, model.model_arch_config[i]
        if kind == "d":
            spec = vllm_config.speculative_config
            of, how = spec.draft_model_config, spec.draft_parallel_config
            arch = of.model_arch_config
        packed = bound_backend(part.format, served.recomputed, served.mixed)
        backend, heads = packed if kind == "p" else SideBySideBackend, of.get_num_kv_heads(how, arch)
        layer = SimpleNamespace(
            attn_type="decoder",
            kv_cache_dtype=vllm_config.cache_config.cache_dtype if kind == "p" else "auto",
            kv_cache_torch_dtype=of.dtype,
            sliding_window=(model.get_sliding_window() or model.attention_chunk_size) if kind == "w" else None,
            attn_backend=backend,
            num_kv_heads=heads,
            head_size=arch.head_size,
            head_size_v=arch.head_size,
        )
        spec, name = Attention.get_kv_cache_spec(layer, vllm_config), f"layers.{i}.{kind}"
        found[name] = backend.customize_spec(spec)
        if kind == "p":
            assert (part.slots.heads, part.slots.head_size) == (heads, arch.head_size)
            found[name + SIDECAR_SUFFIX] = Sidecar(part.format, part.slots, served).get_kv_cache_spec(vllm_config)
            if served.format.S:
                found[name + SINK_SUFFIX] = Sinks(part.format, part.slots, served).get_kv_cache_spec(vllm_config)
    put_first(next(name for name in found if name.endswith(".p")), found)
    for suffix in (SIDECAR_SUFFIX, SINK_SUFFIX):
        smallest_first([name for name in found if name.endswith(suffix)], found)
    return found


def state_spec(vllm_config: Any) -> Any:
    """The state of Mamba-2."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM as Granite
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    layer = SimpleNamespace(
        get_state_shape=lambda: Granite.get_mamba_state_shape_from_config(vllm_config),
        get_state_dtype=lambda: Granite.get_mamba_state_dtype_from_config(vllm_config),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
        is_kv_cache_tp_replicated=False,
    )
    return MambaBase.get_kv_cache_spec(layer, vllm_config)


def planned(vllm_config: Any, *ranks: dict[str, Any], available: int = 0) -> Any:
    """vLLM's plan of a worker's pool; each of `ranks` has its layers."""
    memory = [available] * len(ranks)
    if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is None:  # 0.32
        planning: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        return planning.get_kv_cache_configs(vllm_config, [*ranks], memory)[0]
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    groups = planning.get_global_kv_cache_groups(vllm_config, [*ranks])
    return planning.get_kv_cache_configs(vllm_config, [*ranks], memory, groups)[0]

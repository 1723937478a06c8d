"""What a low-bit cache can't serve is refused here, before weights load, with one sentence that names the way out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.table import DEFAULT_N
from vllm_kvq.integration.drafts import draft_problem, is_draft
from vllm_kvq.integration.setup import kvq_options, pairing_problem
from vllm_kvq.integration.windows import WINDOWS, keep_sixteen_bits, window_problem
from vllm_kvq.kernels.gpu import build as build_cuda
from vllm_kvq.kernels.gpu.cuda import CUDA
from vllm_kvq.kernels.gpu.step import kernels_of

LEAST_CAPABILITY = (8, 0)
CPU_BLOCK = 128


class Refused(ValueError):
    """A model, option or shape that the format can't serve."""


def check_config(vllm_config: Any) -> None:
    """Raise, or in the `vllm` command exit with the bare sentence, when this configuration can't be served."""
    try:
        _check(vllm_config)
    except ValueError as error:
        if Path(sys.argv[0]).name == "vllm":
            raise SystemExit(f"vllm-kvq: {error}") from None
        raise


def _check(vllm_config: Any) -> None:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    name = cache.cache_dtype
    settings = get_format(name).settings(kvq_options(vllm_config))
    if settings.N is not None:
        if cache.user_specified_block_size and cache.block_size != settings.N:
            raise Refused(
                f"kvq option 'N' is {settings.N} but --block-size is {cache.block_size}; set only one of them"
            )
        cache.block_size, cache.user_specified_block_size = settings.N, True
    elif not cache.user_specified_block_size:
        cache.block_size = _default_block()
    if model is None:
        return
    if problems := _refusals(vllm_config):
        all_of_them = ", ".join(what for what, _ in problems)
        raise Refused(f"--kv-cache-dtype {name} does not support {all_of_them}; {problems[0][1]}")
    if settings.keys.pairs_channels and not settings.get("pairing") and (problem := pairing_problem(model)):
        raise Refused(f"--kv-cache-dtype {name}: {problem}")
    _check_geometry(name, vllm_config, model.get_head_size(), cache.block_size or DEFAULT_N, model.dtype)
    try:
        keep_sixteen_bits(vllm_config)
    except ValueError as error:
        raise Refused(f"--kv-cache-dtype {name}: {error}") from None
    # else vLLM asks the backend for a size once the model is loaded, when the formats are bound to this one
    cache.user_specified_block_size = True


def _default_block() -> int:
    """vLLM's own default on the CPU (0.32 sets it, 0.33 leaves it open), ours elsewhere."""
    from vllm.platforms import current_platform

    return CPU_BLOCK if current_platform.is_cpu() else DEFAULT_N


def _check_geometry(name: str, vllm_config: Any, head_size: int, block_size: int, dtype: torch.dtype) -> None:
    from vllm.platforms import current_platform

    try:
        fmt = get_format(name).bind(Geometry(head_size, block_size, dtype), kvq_options(vllm_config))
    except ValueError as error:
        raise Refused(f"--kv-cache-dtype {name}: {error}") from None
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if found is not None and (problem := kernels_problem(fmt, (found.major, found.minor))):
        raise Refused(f"--kv-cache-dtype {name}: {problem}")


def kernels_problem(fmt: PageFormat, capability: tuple[int, int]) -> str | None:
    """Why kernels that nvcc compiles (QJL's) can't be had for such a GPU: better now than after loading weights."""
    return build_cuda.problem(capability) if kernels_of(fmt) is CUDA else None


def _refusals(vllm_config: Any) -> list[tuple[str, str]]:
    """(what, what to do instead) for everything in this configuration that isn't supported."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    from vllm.platforms import current_platform

    text = model.hf_text_config
    plain = "use --kv-cache-dtype auto"
    checks = [
        (model.use_mla, "models with latent attention (MLA)", f"{plain} or fp8_ds_mla"),
        (model.runner_type != "generate", "pooling and embedding models", plain),
        (model.is_encoder_decoder, "encoder-decoder models", plain),
        (model.is_hybrid or model.has_inner_state, "models with Mamba or linear attention layers", plain),
        (_layers_differ(text), "head sizes that differ per layer", f"{plain} or fp8"),
        (window := window_problem(model), window or "", f"{plain} or fp8"),
        (model.is_mm_prefix_lm, "attention in both directions among image tokens", plain),
        (getattr(text, "attention_chunk_size", None), "chunked local attention", plain),
        (getattr(text, "attn_logit_softcapping", None), "a soft-cap on attention logits", plain),
        (text.model_type == "gpt_oss", "learned attention sinks", plain),
        (model.uses_alibi, "ALiBi", plain),
        (
            text.model_type == "falcon",
            "Falcon models, whose layers vLLM does not tell the KV cache dtype",
            plain,
        ),
        (getattr(text, "num_kv_shared_layers", 0), "layers that share their KV cache", plain),
        (
            gpu := _gpu_problem(current_platform),
            gpu or "",
            plain,
        ),
        (
            _skips(vllm_config) and not current_platform.is_cpu(),
            "layers in 16 bits (skip_layers) on this platform",
            "leave it out",
        ),
        (
            vllm_config.kv_transfer_config is not None or vllm_config.cache_config.kv_offloading_size,
            "KV connectors",
            "drop --kv-transfer-config and --kv-offloading-size, or " + plain,
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism",
            "use --tensor-parallel-size",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism",
            "use --tensor-parallel-size",
        ),
        (draft := draft_problem(vllm_config), *(draft or ("", ""))),
        (vllm_config.cache_config.prefix_match_unit is not None, "--prefix-match-unit", "leave it out"),
    ]
    return [(what, instead) for bad, what, instead in checks if bad]


def capability_problem(capability: tuple[int, int]) -> str | None:
    """Why a CUDA device of this compute capability is refused."""
    if tuple(capability) >= LEAST_CAPABILITY:
        return None
    return f"GPUs of compute capability {capability[0]}.{capability[1]} (8.0, Ampere, is the least)"


def _gpu_problem(platform: Any) -> str | None:
    if not platform.is_cuda():
        return None
    found = platform.get_device_capability()
    return None if found is None else capability_problem((found.major, found.minor))


def _layers_differ(text: Any) -> bool:
    """Whether layers have different KV shapes: their pages would have different sizes."""
    config = text.to_dict()
    own = (config.get("per_layer_config") or {}).values()
    return any(
        isinstance(config.get(name), list)
        or any(layer.get(name, config.get(name)) != config.get(name) for layer in own)
        for name in ("head_dim", "num_key_value_heads")
    )


def _skips(vllm_config: Any) -> bool:
    return bool(vllm_config.cache_config.kv_cache_dtype_skip_layers or kvq_options(vllm_config).get("skip_layers"))


def other_backend(vllm_config: Any, asked: Any) -> str | None:
    """A layer under one of our dtypes has another dtype: its backend, None for the platform's own choice.

    Only window layers, those that the user skips and a draft's may do that.
    """
    cache = vllm_config.cache_config
    if is_draft(vllm_config):
        return _sixteen_bits("DraftBackend", cache.skip_page_size_padded)
    if WINDOWS in cache.kv_cache_dtype_skip_layers and asked.has_sliding_window:
        return None
    if not any(layer.isdigit() for layer in cache.kv_cache_dtype_skip_layers):
        raise Refused(
            f"--kv-cache-dtype {cache.cache_dtype} does not reach an attention layer of this model, whose cache "
            "would stay in 16 bits; use --kv-cache-dtype auto"
        )
    return _sixteen_bits("SixteenBitBackend", cache.skip_page_size_padded)


def _sixteen_bits(name: str, page: int) -> str:
    from vllm_kvq.integration import sixteen

    sixteen.SixteenBitBackend.page = page
    return f"{sixteen.__name__}.{name}"


# what vLLM asks of a backend before it makes a layer, and what it is called in a sentence
_ASKED = {
    "use_mla": "latent attention (MLA)",
    "has_sink": "learned attention sinks",
    "use_sparse": "sparse attention",
    "use_mm_prefix": "attention in both directions among image tokens",
    "use_per_head_quant_scales": "quantization scales per head",
    "has_sliding_window": "sliding-window attention",
    "use_non_causal": "attention in both directions",
    "use_kv_connector": "KV connectors",
    "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism",
    "use_rswa": "relative sliding windows",
    "use_batch_invariant": "batch invariance",
}


def check_selection(asked: Any) -> None:
    """vLLM's AttentionSelectorConfig of a layer with our dtype."""
    for name, what in _ASKED.items():
        if getattr(asked, name, False):
            raise Refused(f"--kv-cache-dtype {asked.kv_cache_dtype} does not support {what}; use --kv-cache-dtype auto")


def check_layer(
    alibi_slopes: object,
    sliding_window: object,
    soft_cap: object,
    attn_type: str,
    sharing: object,
    extra: dict[str, Any],
) -> None:
    """The arguments of one attention layer: what `_refusals` could not see from the configuration."""
    checks = [
        (alibi_slopes is not None, "ALiBi"),
        (sliding_window is not None, "sliding-window attention"),
        (bool(soft_cap), "a soft-cap on attention logits"),
        (attn_type != "decoder", f"{attn_type} attention"),
        (sharing is not None, "layers that share their KV cache"),
        (extra.pop("sinks", None) is not None, "learned attention sinks"),
    ]
    for bad, what in checks:
        if bad:
            raise Refused(f"low-bit KV cache formats do not support {what}; use --kv-cache-dtype auto")
    given = {k: v for k, v in extra.items() if v is not None}
    if given:
        raise Refused(
            f"low-bit KV cache formats do not support the attention options {sorted(given)}; use --kv-cache-dtype auto"
        )

"""What a low-bit cache can't serve is refused before weights load, with one sentence that names the way out.

Nothing here changes a configuration.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.contract import broken_promise
from vllm_kvq.integration.plan.connectors import connector_problem, store_problem
from vllm_kvq.integration.plan.drafts import draft_problem
from vllm_kvq.integration.plan.memory import memory_problem
from vllm_kvq.integration.plan.model.heads import Heads
from vllm_kvq.integration.plan.model.layers import Layers, window_problem
from vllm_kvq.integration.plan.model.rope import pairing_problem
from vllm_kvq.integration.plan.model.states import drafts_problem, hybrid_problem
from vllm_kvq.integration.plan.options import Options, unread_options
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.kernels.gpu.step import kernels_of
from vllm_kvq.kernels.variables import variables_problem
from vllm_kvq.problem import Problem, Refused

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.platforms import Platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

LEAST_CAPABILITY = (8, 0)


def check(vllm_config: VllmConfig) -> None:
    """Raise when this configuration can't be served; the first problem is the one that is named."""
    if problem := unread_options(vllm_config):
        raise Refused(str(problem))
    cache, model = vllm_config.cache_config, vllm_config.model_config
    try:
        options = Options.of(vllm_config)
    except ValueError as error:
        raise Refused(str(error)) from None
    settings = options.settings
    if settings.N is not None and cache.user_specified_block_size and cache.block_size != settings.N:
        raise Refused(f"kvq option 'N' is {settings.N} but --block-size is {cache.block_size}; set only one of them")
    if model is None:
        return
    try:
        layers = Layers.of(vllm_config, options)
    except ValueError as error:
        raise Refused(str(error)) from None
    if layers.skipped and not layers.packed:
        raise Refused(
            "kvq option 'skip_layers' names every layer that could be packed; leave some out, or use "
            "--kv-cache-dtype auto"
        )
    if unknown := variables_problem(os.environ):
        raise Refused(str(unknown))
    if problems := _problems(vllm_config, layers):
        all_of_them = ", ".join(problem.what for problem in problems)
        raise Refused(f"--kv-cache-dtype {options.name} does not support {all_of_them}; {problems[0].instead}")
    if sentence := _why_not_packed(vllm_config, options, layers):
        raise Refused(f"--kv-cache-dtype {options.name}: {sentence}")
    if problem := store_problem(vllm_config, plan(vllm_config, options, layers).fingerprint):
        raise Refused(str(problem))
    if problem := memory_problem(vllm_config):
        raise Refused(str(problem))


def check_other(vllm_config: VllmConfig) -> None:
    """The same for a dtype other than ours, where there may be nothing of ours."""
    spec = vllm_config.speculative_config
    if spec is not None and spec.kv_cache_dtype == vllm_config.cache_config.cache_dtype:
        return  # the copy that vLLM makes of our configuration for a draft's layers
    if problem := unread_options(vllm_config):
        raise Refused(str(problem))


def _why_not_packed(vllm_config: VllmConfig, options: Options, layers: Layers) -> str | None:
    """Why this model's heads and layers can't be packed so, or not by kernels of this GPU: a sentence."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    if problem := pairing_problem(options, model):
        return str(problem)
    try:
        served = plan(vllm_config, options, layers)
    except ValueError as error:
        return str(error)
    for part in served.parts:
        if sentence := broken_promise(part.format):
            return f"{sentence}; vllm-kvq conformance --formats {options.name} lists all that is wrong with it"
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if found is None:
        return None
    problems = (why_no_kernels(part.format, (found.major, found.minor)) for part in served.parts)
    return next(filter(None, problems), None)


def why_no_kernels(fmt: PageFormat, capability: tuple[int, int]) -> str | None:
    """Why kernels that nvcc compiles (QJL's) can't be had for such a GPU: better now than after loading weights."""
    kernels = kernels_of(fmt)
    return None if kernels is None else kernels.unavailable(capability)


def _problems(vllm_config: VllmConfig, layers: Layers) -> list[Problem]:
    """Everything in this configuration that isn't supported."""
    from vllm.platforms import current_platform

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    plain = "use --kv-cache-dtype auto"
    falcon = model.hf_text_config.model_type == "falcon"
    checks = [
        _unless(not model.use_mla, "models with latent attention (MLA)", f"{plain} or fp8_ds_mla"),
        _unless(model.runner_type == "generate", "pooling and embedding models", plain),
        _unless(not model.is_encoder_decoder, "encoder-decoder models", plain),
        hybrid_problem(model),
        _unless(
            not _heads_differ(vllm_config, layers),
            "full-attention layers that have different KV heads",
            f"{plain} or fp8",
        ),
        window_problem(model),
        _unless(not model.is_mm_prefix_lm, "attention in both directions among image tokens", _only_text(model)),
        _unless(not model.uses_alibi, "ALiBi", plain),
        _unless(not falcon, "Falcon models, to which vLLM does not pass the KV cache dtype", plain),
        _unless(not cache.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill", "leave it out"),
        _gpu_problem(current_platform),
        connector_problem(vllm_config),
        *(
            _unless(size == 1, f"{kind} context parallelism", "use --tensor-parallel-size")
            for kind, size in (
                ("decode", parallel.decode_context_parallel_size),
                ("prefill", parallel.prefill_context_parallel_size),
            )
        ),
        drafts_problem(vllm_config),
        draft_problem(vllm_config),
        _unless(cache.prefix_match_unit is None, "--prefix-match-unit", "leave it out"),
    ]
    return [problem for problem in checks if problem is not None]


def _unless(good: bool, what: str, instead: str) -> Problem | None:
    return None if good else Problem(what, instead)


def capability_problem(capability: tuple[int, int]) -> Problem | None:
    """Why a CUDA device of this compute capability is refused."""
    if tuple(capability) >= LEAST_CAPABILITY:
        return None
    return Problem(
        f"GPUs of compute capability {capability[0]}.{capability[1]} (at least 8.0, Ampere, is needed)",
        "use --kv-cache-dtype auto",
    )


def _gpu_problem(platform: Platform) -> Problem | None:
    if not platform.is_cuda():
        return None
    found = platform.get_device_capability()
    return None if found is None else capability_problem((found.major, found.minor))


def _only_text(model: ModelConfig) -> str:
    """What to do with a model whose image tokens see later ones. vLLM leaves that out where requests can't hold images;
    these may come as embeddings, too."""
    config = model.multimodal_config
    if config is not None and config.enable_mm_embeds:
        flag = "--language-model-only without --enable-mm-embeds"
    else:
        flag = "--language-model-only"
    return f"serve only text with {flag}, or use --kv-cache-dtype auto"


def _heads_differ(vllm_config: VllmConfig, layers: Layers) -> bool:
    """Whether the layers that would be packed have KV heads of different sizes or numbers. Those of other layers may
    differ: pages of several sizes lie side by side."""
    config = vllm_config.model_config.hf_text_config.to_dict()
    if any(isinstance(config.get(name), list) for name in ("head_dim", "num_key_value_heads")):
        return True  # OpenELM's, of which vLLM knows only one number
    return len({Heads.of(vllm_config, layer) for layer in layers.packed_layers}) > 1


# what vLLM asks of a backend before it makes a layer, and what it is called in a sentence
_ASKED = {
    "use_mla": "latent attention (MLA)",
    "use_sparse": "sparse attention",
    "use_mm_prefix": "attention in both directions among image tokens",
    "use_per_head_quant_scales": "quantization scales per head",
    "has_sliding_window": "sliding-window attention",
    "use_non_causal": "attention in both directions",
    "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism",
    "use_rswa": "relative sliding windows",
    "use_batch_invariant": "batch invariance",
}


def check_selection(asked: AttentionSelectorConfig) -> None:
    """`asked`: what vLLM asks for a layer with our dtype."""
    for name, what in _ASKED.items():
        if getattr(asked, name, False):
            raise Refused(f"--kv-cache-dtype {asked.kv_cache_dtype} does not support {what}; use --kv-cache-dtype auto")


def check_layer(
    alibi_slopes: object,
    sliding_window: object,
    attn_type: str,
    extra: dict[str, Any],
) -> None:
    """The arguments of one attention layer: what `_problems` could not see from the configuration."""
    checks = [
        (alibi_slopes is not None, "ALiBi"),
        (sliding_window is not None, "sliding-window attention"),
        (attn_type != "decoder", f"{attn_type} attention"),
    ]
    for bad, what in checks:
        if bad:
            raise Refused(f"low-bit KV cache formats do not support {what}; use --kv-cache-dtype auto")
    given = {k: v for k, v in extra.items() if v is not None}
    if given:
        raise Refused(
            f"low-bit KV cache formats do not support the attention options {sorted(given)}; use --kv-cache-dtype auto"
        )

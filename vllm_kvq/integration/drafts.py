"""Speculative decoding with drafts that have a KV cache of their own: draft models, EAGLE heads, MTP layers.

Their layers stay in vLLM's own cache: what a draft reads decides how many guesses are right, never what is answered,
and vLLM's proposer builds attention metadata for the draft's own layers alone, where companions would be missing.
"""

from __future__ import annotations

from typing import Any

from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.setup import kvq_options

WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa")
WITH_CACHE = ("draft_model", "eagle", "eagle3", "mtp")


def draft_problem(vllm_config: Any) -> tuple[str, str] | None:
    """(what, what to do instead) for a way of drafting that does not go with a packed cache."""
    from vllm.platforms import current_platform

    spec = vllm_config.speculative_config
    if spec is None or spec.method in WITHOUT_CACHE:
        return None
    if spec.method not in WITH_CACHE:
        return (
            f"speculative decoding with method {spec.method!r}",
            f"use one of {', '.join((*WITHOUT_CACHE, *WITH_CACHE))}",
        )
    if not current_platform.is_cpu():
        return f"speculative decoding with method {spec.method!r} on this platform", "use method 'ngram'"
    if spec.kv_cache_dtype in FORMATS:
        return "a low-bit cache for the draft", "leave kv_cache_dtype out of the speculative config"
    draft = spec.draft_model_config
    if draft.use_mla:
        return "drafts with latent attention (MLA)", "use method 'ngram'"
    if draft.get_sliding_window() is not None or "sliding_attention" in (_kinds(draft) or ()):
        return "drafts with sliding-window attention", "use another draft or method 'ngram'"
    if (layers := draft_layers(spec)) > (most := _smallest_kind(vllm_config)):
        # vLLM's proposer wants all of them in one KV cache group, and groups are as large as the smallest kind
        return (
            f"a draft of {layers} layers where the smallest kind of the model's layers has {most}",
            "use a smaller draft",
        )
    return None


def draft_layers(spec: Any) -> int:
    """How many attention layers the draft has."""
    config = spec.draft_model_config.hf_text_config
    return getattr(config, "n_predict", None) or 1 if spec.method == "mtp" else config.num_hidden_layers


def _smallest_kind(vllm_config: Any) -> int:
    """The least of: packed layers, layers with a sliding window, full layers that stay in 16 bits."""
    model = vllm_config.model_config
    layers, kinds = model.get_total_num_hidden_layers(), _kinds(model) or ()
    windows = sum("sliding" in kind for kind in kinds)
    skip = {*kvq_options(vllm_config).get("skip_layers", ()), *vllm_config.cache_config.kv_cache_dtype_skip_layers}
    skipped = len({int(i) for i in skip if str(i).isdigit()})
    return min(n for n in (layers - windows - skipped, windows, skipped) if n)


def _kinds(model: Any) -> list[str] | None:
    return getattr(model.hf_text_config, "layer_types", None)


def draft_token_bytes(vllm_config: Any) -> int:
    """Bytes of one token in one layer of the draft's cache; 0 where there is none. Tells vLLM to keep it in 16 bits."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method not in WITH_CACHE:
        return 0
    if spec.kv_cache_dtype is None:
        spec.kv_cache_dtype = "auto"
    draft = spec.draft_model_config
    return 2 * draft.get_num_kv_heads(spec.draft_parallel_config) * draft.get_head_size() * draft.dtype.itemsize


def is_draft(vllm_config: Any) -> bool:
    """Whether vLLM is making a draft's layers beside packed ones: the configuration says `auto`, our page is in it."""
    from vllm.platforms import current_platform

    spec = vllm_config.speculative_config
    return (
        current_platform.is_cpu()
        and spec is not None
        and spec.method in WITH_CACHE
        and vllm_config.cache_config.cache_dtype == spec.kv_cache_dtype
        and vllm_config.cache_config.skip_page_size_padded is not None
    )

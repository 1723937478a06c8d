"""Configurations by the kinds of their layers, the model's and the draft's."""

from __future__ import annotations

from typing import Any

from configurations import CASES
from engine_arguments import kvq

# p packed, s skipped, w with a sliding window, m with a state, d a draft's
LAYERS = {
    "plain": "pp",
    "no sinks": "pp",
    "sinks": "pp",
    "option N": "pp",
    "a skipped layer": "ps",
    "vLLM's flag, two ranks": "ps",
    "ngram": "pp",
    "a draft model": "ppdd",
    "a draft with a skipped layer": "psd",
    "windows": "wwwwwp",
    "by layer": "pp",
}
"""The kinds of layers of each case, the model's and the draft's."""
SHORT = {"kv_cache_dtype": "kitty2", "max_model_len": 1024}
LONG = {"kv_cache_dtype": "squat2", "max_model_len": 2048, "max_num_batched_tokens": 128, "model": "Gemma-3"}
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "1k": (SHORT, "pp"),
    "1k, no sinks": ({**SHORT, **kvq(S=0)}, "pp"),
    "windows, no sinks": ({**LONG, **kvq(S=0)}, "wwwwwp"),
    "a hybrid, no sinks": (
        {"kv_cache_dtype": "squat2", "max_model_len": 2048, "model": "Granite 4", **kvq(S=0)},
        "mmpm",
    ),
    "a draft model, large blocks": (
        {"kv_cache_dtype": "squat2", "block_size": 1024, "max_model_len": 4096, "draft": "draft_model"},
        "ppdd",
    ),
    # a window takes what it sees, and tokens that are scheduled but not yet settled
    "windows in a long request": (LONG, "wwwwwp"),
    "windows over two stages": ({**LONG, "pipeline_parallel_size": 2}, "wwwwwp"),
    "windows and a skipped layer": (
        {**LONG, "numbers": {"num_hidden_layers": 12}, **kvq(skip_layers=[5])},
        "wwwwwswwwwwp",
    ),
    "larger heads in full layers": ({**LONG, "model": "Gemma-4"}, "wwwwwp"),
    "larger heads in a skipped layer, too": (
        {**LONG, "model": "Gemma-4", "numbers": {"num_hidden_layers": 18}, **kvq(skip_layers=[5])},
        "wwwwwswwwwwpwwwwwp",
    ),
    "smaller heads in full layers": ({**LONG, "model": "Gemma-4", "numbers": {"global_head_dim": 64}}, "wwwwwp"),
    "chunks": ({**LONG, "model": "Llama 4", "block_size": 64}, "wwwp"),
    # the other three layers of this model share caches, and vLLM's runner collects nothing from them
    "sharing layers": ({**LONG, "model": "Gemma-3n"}, "pwwp"),
    "a hybrid": ({"kv_cache_dtype": "squat2", "max_model_len": 2048, "model": "Granite 4"}, "mmpm"),
    "a hybrid, small pages": ({"kv_cache_dtype": "innerq2", "model": "Granite 4", "block_size": 32}, "mmpm"),
    "a hybrid without prefix caching": (
        {"kv_cache_dtype": "squat2", "model": "Granite 4", "enable_prefix_caching": False},
        "mmpm",
    ),
    "a hybrid with a skipped layer": (
        {
            "kv_cache_dtype": "squat2",
            "model": "Granite 4",
            "numbers": {"num_hidden_layers": 8, "layer_types": ["linear_attention", "full_attention"] * 4},
            "block_size": 32,
            **kvq(skip_layers=[1, 3]),
        },
        "msmsmpmp",
    ),
    "three kinds of layers": (
        {**LONG, "numbers": {"num_hidden_layers": 18}, **kvq(skip_layers=[5])},
        "wwwwwswwwwwpwwwwwp",
    ),
}
MIXED = {"kv_cache_dtype": "qjl3", "model": "Gemma-3", "max_num_batched_tokens": 128}


def gemma(layers: int, skip: list[int], m: dict[str, int]) -> dict[str, Any]:
    return {**MIXED, "numbers": {"num_hidden_layers": layers}, **kvq(m=m, S=8, skip_layers=skip)}


# Equally many pages of each size are a pattern for vLLM; for companions, without the layers that are not packed.
MORE |= {
    "by layer, the larger page first": (gemma(18, [], {"5": 512, "*": 128}), "wwwwwp" * 3),
    "by layer, equally many of each size": (gemma(24, [], {"5": 512, "17": 512, "*": 128}), "wwwwwp" * 4),
    "by layer, with skipped ones": (gemma(24, [23], {"5": 512, "*": 128}), "wwwwwp" * 3 + "wwwwws"),
    "by layer, with equally many skipped ones": (gemma(18, [5], {"11": 512, "*": 128}), "wwwwws" + "wwwwwp" * 2),
    "by layer, only companions are a pattern": (
        gemma(42, [5, 11, 17], {"23-34": 512, "*": 128}),
        "wwwwws" * 3 + "wwwwwp" * 4,
    ),
}
ALL = {name: (CASES[name][0], layers) for name, layers in LAYERS.items()} | MORE
"""The arguments of an engine, and a letter for each layer."""

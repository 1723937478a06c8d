"""Tiny copies of real models: random weights in two layers or a few more, with the real tokenizer and vocabulary, head
size, query heads per KV head, biases, RoPE and order of kinds of layers."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from proof.models.architecture import HIDDEN, Architecture
from proof.weights.folder import folder, missing
from proof.weights.table import MODELS

COPIES = {f"copy of {name}": name for name in MODELS}
"""Names of copies, each with its model's."""
WINDOW = 48
"""Tokens, so that prompts are longer than a window."""
OWN = ("_model_name_or_path", "architectures", "dtype", "transformers_version")
"""Entries of a configuration that are about its checkpoint."""


def tokenizer_of(name: str) -> Path:
    """The folder of a copy's tokenizer."""
    return folder() / COPIES[name]


@functools.cache
def copy(name: str) -> Architecture:
    """ValueError if the real model is not there."""
    if sentence := missing(COPIES[name]):
        raise ValueError(sentence)
    config = json.loads((tokenizer_of(name) / "config.json").read_text(encoding="utf-8"))
    numbers = {key: value for key, value in config.items() if key not in OWN} | _small(config)
    windows = "sliding_attention" in numbers.get("layer_types", ())
    return Architecture(name, _class(config["model_type"]), numbers, "", replay=True, windows=windows)


def _small(config: dict[str, Any]) -> dict[str, Any]:
    """The numbers that differ."""
    # Transformers wants a multiple of the number of heads, vLLM's kernels one of 64
    heads = math.lcm(config["num_attention_heads"], 64)
    small: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": HIDDEN, "hidden_size": max(HIDDEN, heads)}
    if "head_dim" not in config:
        # the size of a head is a share of the hidden states': one KV head with its query heads
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        size = config["hidden_size"] // config["num_attention_heads"]
        small |= {"num_attention_heads": group, "num_key_value_heads": 1, "hidden_size": group * size}
    if kinds := config.get("layer_types"):
        # up to the first layer with full attention, at least two
        layers = max(2, 1 + kinds.index("full_attention"))
        small |= {"num_hidden_layers": layers, "layer_types": kinds[:layers]}
    if config.get("sliding_window"):
        small["sliding_window"] = WINDOW
    return small


def _class(model_type: str) -> str:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].__name__

"""How large the biases of a checkpoint's key projections are, read from its files: some kilobytes, in milliseconds.

Qwen2 and Qwen2.5 have such biases, and in some layers they are many times as large as what the weights add to them.
Llamas, Gemmas and Qwen3 have none. A model that normalizes keys (QK-norm) counts as having none, too: what reaches the
cache is then as large as the norm's weights say, whatever the bias.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.plan.model.weights import weights_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OWN = ("k_proj",)
"""Projections that make keys only."""
FUSED = ("qkv_proj", "c_attn")
"""Projections that make queries, keys and values, in this order."""
NORMS = ("k_norm", "k_layernorm", "key_layernorm")
OTHER_TOWERS = re.compile(r"vision|visual|image|audio|speech|encoder")
"""Parts of a model whose layers have no decoder KV cache."""

BIASED = re.compile(r"^qwen2(_|$)")
"""Types of models that have large key biases in all sizes that were looked at."""

_LAYER = re.compile(
    r"^(?P<tower>.*?)\b(?:layers|h)\.(?P<layer>\d+)\.(?:\w+\.)*?(?P<module>\w+)\.(?P<kind>weight|bias)$"
)


def key_biases(folder: Path, layers: int, kv_heads: int, head_size: int) -> dict[int, float]:
    """Layer -> the largest norm that the bias of one of its KV heads has; empty where there are none to be read.

    Shapes are the whole model's, not those of one rank.
    """
    width, found = kv_heads * head_size, {}
    for layer, module, bias in _biases(folder, layers):
        if bias.dim() != 1:
            return {}
        if module in FUSED:
            bias = bias[-2 * width : -width] if len(bias) >= 3 * width else bias[:0]
        if len(bias) != width:
            return {}
        found[layer] = bias.float().view(kv_heads, head_size).norm(dim=1).max().item()
    return found


def _biases(folder: Path, layers: int) -> Iterator[tuple[int, str, Any]]:
    """(layer, module, tensor) of every projection that has a bias for keys; nothing where keys are normalized."""
    from safetensors import safe_open

    places = {name: file for file, names in _names(folder).items() for name in names}
    parts = [(name, m) for name in places if (m := _LAYER.match(name)) and not OTHER_TOWERS.search(m["tower"])]
    parts = [(name, m) for name, m in parts if int(m["layer"]) < layers]
    if any(m["module"] in NORMS for _, m in parts):
        return
    biased = [(name, m) for name, m in parts if m["kind"] == "bias" and m["module"] in (*OWN, *FUSED)]
    towers = Counter(m["tower"] for _, m in biased)
    decoder = max(towers, key=lambda tower: towers[tower], default="")  # a layer that drafts may stand next to it
    biased = [(name, m) for name, m in biased if m["tower"] == decoder]
    for file in sorted({places[name] for name, _ in biased}):
        with safe_open(file, "pt") as tensors:
            for name, m in biased:
                if places[name] == file:
                    yield int(m["layer"]), m["module"], tensors.get_tensor(name)


def _names(folder: Path) -> dict[Path, list[str]]:
    """The tensors of each file: from the index where a checkpoint has one, so that no file is opened for nothing."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    found: dict[Path, list[str]] = {}
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))
        places = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError(f"{index} is no index")
        for name, file in places.items():
            found.setdefault(folder / file, []).append(name)
        return found
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found[file] = list(tensors.keys())
    return found


def of_model(vllm_config: VllmConfig) -> Mapping[int, float]:
    """`key_biases` of the model that is served; empty when its weights are not here, or not those of its files.

    Files that can't be read as weights must never stop a server that would start without them.
    """
    from safetensors import SafetensorError

    model = vllm_config.model_config
    folder = weights_folder(model.model, model.revision)
    if folder is None or vllm_config.load_config.load_format == "dummy":
        return {}
    try:
        heads, size = model.get_total_num_kv_heads(), model.get_head_size()
        return key_biases(folder, model.get_total_num_hidden_layers(), heads, size)
    except (SafetensorError, OSError, ValueError):  # damaged files, which vLLM reports better than we could
        return {}


def usually_biased(vllm_config: VllmConfig) -> bool:
    """By the type of the model, when its weights are not on this machine."""
    model = vllm_config.model_config
    folder = weights_folder(model.model, model.revision)
    here = folder is not None and any(folder.glob("*.safetensors"))
    return not here and bool(BIASED.match(model.hf_text_config.model_type))

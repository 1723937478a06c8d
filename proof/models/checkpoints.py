"""Random checkpoints of any architecture whose greedy tokens are decisive and depend on the cache."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from proof.models.architecture import VOCAB, Architecture
from proof.oracle.adapters import ADAPTERS, folder_of

LOGIT_STD = 30.0
SPECIAL = 8
"""How many of the first tokens have logits of zero: end of text, placeholders of images."""
# the standard deviation of a weight's output for a unit input, by the parameter's name
GAINS = (
    (r"(query_key_value|qkv_proj|c_attn|[qk]_proj)\.weight$", 1.4),
    (r"(self_attn|self_attention|attention|attn)\.(o_proj|out_proj|dense|c_proj)\.weight$", 2.0),
    (r"[qk]_norm\.weight$", 1.4),
)
UNSCALED = 0.125**0.5
"""The scale of query and key norms of 64 channels, in models that do not divide scores by the root of the head size."""


def write_config(arch: Architecture, path: Path) -> Path:
    """Only config.json: enough for a model that is refused before its weights load."""
    config = arch.build()
    if arch.refused is not None:
        import transformers

        # the class that Transformers would use; the name is what vLLM looks for
        mapping = transformers.models.auto.modeling_auto
        names = {**mapping.MODEL_MAPPING_NAMES, **mapping.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
        if arch.model != "AutoModel":
            names.update(mapping.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        if arch.config == "WhisperConfig":
            names = mapping.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
        config.architectures = [names[config.model_type]]
    config.save_pretrained(path)
    return path


def write_model(arch: Architecture, path: Path) -> Path:
    import transformers

    cls, config = getattr(transformers, arch.model), arch.build()
    torch.manual_seed(0)
    model = cls.from_config(config) if cls.__name__.startswith("Auto") else cls(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.float().named_parameters():
            _fill(name, p, generator, tied=config.get_text_config().tie_word_embeddings)
            if arch.config == "Gemma3nTextConfig" and name.endswith(("q_norm.weight", "k_norm.weight")):
                p.mul_(UNSCALED)
    model.to(getattr(torch, arch.dtype)).save_pretrained(path)
    if arch.adapter:
        write_adapters(path, config)
    return path


_writing = threading.Lock()


def written_beside(model: str, arch: Architecture, complete: Callable[[Path], None]) -> str:
    """The path of a checkpoint of `arch` next to `model`, which is written at first use; `complete` adds what turns
    prompts into tokens."""
    path = Path(f"{model}-{arch.slug}")
    with _writing:
        if not path.exists():
            write_model(arch, path)
            complete(path)
    return str(path)


def copy_tokenizer(of: str | Path, path: Path) -> None:
    """The tokenizer of another checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(of) / name, path / name)


def _fill(name: str, p: torch.Tensor, generator: torch.Generator, tied: bool) -> None:
    noise = torch.randn(p.shape, generator=generator)
    gain = next((g for pattern, g in GAINS if re.search(pattern, name)), 1.0)
    if name.endswith("bias"):
        # a bias that values or logits share makes all tokens alike
        p.copy_((0.5 if re.search("q_proj|k_proj", name) else 0.05) * noise)
    elif name.endswith("sinks"):
        p.copy_(torch.linspace(-1, 4, p.numel()))  # as large as scores are
    elif p.ndim == 1:
        p.mul_(gain)  # norms: ones, or zeros where the model adds one
    elif re.search(r"lm_head|embed_out", name):
        p.copy_(noise * LOGIT_STD / p.shape[-1] ** 0.5)
        p[:SPECIAL] = 0
    elif re.search(r"embed|wte|wpe", name):
        # tied embeddings are kept below what attention adds, else every token would predict itself
        p.copy_(noise * (0.3 if re.search("wpe|position", name) else 0.05 if tied else 1.0))
    else:
        transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))  # GPT-2's Conv1D
        p.copy_(gain * noise / p.shape[0 if transposed else -1] ** 0.5)


def write_adapters(checkpoint: Path, config: Any, rank: int = 8) -> None:
    """LoRA adapters of the query, key, value and output projections, next to a checkpoint."""
    for number in range(1, ADAPTERS + 1):
        _write_adapter(folder_of(checkpoint, number), config, rank, torch.Generator().manual_seed(1 + number))


def _write_adapter(path: Path, config: Any, rank: int, generator: torch.Generator) -> None:
    path.mkdir(parents=True)
    heads, size = config.num_attention_heads, config.head_dim
    sizes = {
        "q_proj": (config.hidden_size, heads * size),
        "k_proj": (config.hidden_size, config.num_key_value_heads * size),
        "v_proj": (config.hidden_size, config.num_key_value_heads * size),
        "o_proj": (heads * size, config.hidden_size),
    }
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, (inner, outer) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) / inner**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outer, rank, generator=generator) / rank**0.5
    save_file(weights, path / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(sizes),
    }
    (path / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")


PROMPT_TOKENS = range(SPECIAL, VOCAB)

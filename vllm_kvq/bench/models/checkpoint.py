"""A Llama checkpoint written as plain files: config.json, model.safetensors and the tokenizer's files.

vLLM and transformers read nothing else, and neither is needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

# Ids 0-3 of every tokenizer created here. Chat turns end with <eos>, which also stops generation.
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<turn>")
BOS_ID, EOS_ID, PAD_ID = range(3)

# One turn: <turn>role\ncontent<eos>. The tokenizer adds no <bos> itself, the template does.
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, under short names; `config` uses the names of config.json."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 1024
    max_position: int = 4096
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    tied: bool = False
    """Whether the embedding is also the head."""
    attention_bias: bool = False
    """Whether the four projections of attention have biases."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide into {self.kv_heads} KV heads")

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "tie_word_embeddings": self.tied,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in a fixed order (seeded initialisation relies on it)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            yield p + "input_layernorm.weight", (self.hidden,)
            yield p + "self_attn.q_proj.weight", (q, self.hidden)
            yield p + "self_attn.k_proj.weight", (kv, self.hidden)
            yield p + "self_attn.v_proj.weight", (kv, self.hidden)
            yield p + "self_attn.o_proj.weight", (self.hidden, q)
            if self.attention_bias:
                for name, size in (("q", q), ("k", kv), ("v", kv), ("o", self.hidden)):
                    yield p + f"self_attn.{name}_proj.bias", (size,)
            yield p + "post_attention_layernorm.weight", (self.hidden,)
            yield p + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield p + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield p + "mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)


def save_checkpoint(
    out_dir: Path,
    shape: LlamaShape,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    sampling: Mapping[str, float] | None = None,
) -> None:
    """Write the model into `out_dir`; config.json is written last, as the mark of a complete checkpoint.

    `sampling` holds a server's defaults for parameters that a request leaves out.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights[name].detach().to(dtype).contiguous() for name, _ in shape.parameters()}
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out_dir / "tokenizer.json"))
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS_ID],
            "eos_token": SPECIAL_TOKENS[EOS_ID],
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "model_max_length": shape.max_position,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        out_dir / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, **(sampling or {})},
    )
    _write_json(out_dir / "config.json", shape.config(dtype))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

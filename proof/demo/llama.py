"""The demo model's shape, and its forward pass, written out: training inspects attention, which libraries hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kvq.bench.models.checkpoint import LlamaShape

Weights = Mapping[str, Tensor]


def shape_of(config: Mapping[str, Any]) -> LlamaShape:
    """The inverse of `LlamaShape.config`; ValueError for another model."""
    shape = LlamaShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_position=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        rms_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
        attention_bias=config["attention_bias"],
    )
    differs = [k for k, v in shape.config(torch.float32).items() if k != "torch_dtype" and config.get(k) != v]
    if differs:
        raise ValueError(f"config.json is not that of a plain Llama: {differs[0]!r} is {config.get(differs[0])!r}")
    return shape


@dataclass(frozen=True)
class Watch:
    """Heads of a layer whose attention is requested: log-probabilities (batch, heads, queries, keys)."""

    layer: int
    heads: tuple[int, ...]


def forward(
    shape: LlamaShape,
    weights: Weights,
    ids: Tensor,
    only: Tensor | None = None,
    watch: Sequence[Watch] = (),
    tap: Callable[[Tensor, Tensor, Tensor], None] = lambda query, key, value: None,
) -> tuple[Tensor, list[Tensor]]:
    """Logits of `ids` (batch, length), everywhere or where the mask `only` is set, and what is watched.

    `tap` is given each layer's queries, keys and values after RoPE: (batch, heads, length, head size).
    """
    cos, sin = (table.to(weights["model.norm.weight"].dtype) for table in _rope_tables(shape, ids.shape[1]))
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    seen = []
    for i in range(shape.layers):
        w = {n.removeprefix(p): t for n, t in weights.items() if n.startswith(p := f"model.layers.{i}.")}
        h = F.rms_norm(x, (shape.hidden,), w["input_layernorm.weight"], shape.rms_eps)
        q, k, v = (
            F.linear(h, w[f"self_attn.{n}_proj.weight"], w.get(f"self_attn.{n}_proj.bias"))
            .unflatten(-1, (-1, shape.head_dim))
            .transpose(1, 2)
            for n in "qkv"
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        tap(q, k, v)
        seen += [_attention(shape, q, k, one.heads) for one in watch if one.layer == i]
        a = _attend(q, k, v)
        x = x + F.linear(a.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"], w.get("self_attn.o_proj.bias"))
        h = F.rms_norm(x, (shape.hidden,), w["post_attention_layernorm.weight"], shape.rms_eps)
        gate = F.silu(F.linear(h, w["mlp.gate_proj.weight"])) * F.linear(h, w["mlp.up_proj.weight"])
        x = x + F.linear(gate, w["mlp.down_proj.weight"])
    if only is not None:
        x = x[only]
    x = F.rms_norm(x, (shape.hidden,), weights["model.norm.weight"], shape.rms_eps)
    return F.linear(x, weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]), seen


SHORT = 256
"""Up to this length PyTorch's kernel is slower than the formula (its backward pass in bfloat16: 7 times)."""


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[2]
    if length > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grouped = q.reshape(*k.shape[:2], -1, q.shape[-1])  # the query heads of a group, one below the other
    future = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
    scores = (grouped @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).unflatten(2, (-1, length)) + future
    return (scores.softmax(-1).flatten(2, 3) @ v).view(q.shape)


def _attention(shape: LlamaShape, q: Tensor, k: Tensor, heads: tuple[int, ...]) -> Tensor:
    group = shape.heads // shape.kv_heads
    scores = q[:, heads].float() @ k[:, [h // group for h in heads]].float().transpose(-1, -2)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores * shape.head_dim**-0.5).masked_fill(future, -torch.inf).log_softmax(-1)


def _rope_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angle = torch.outer(torch.arange(length).float(), shape.rope_theta**-half)
    return angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation of the pairs (i, i + d/2)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin

"""Random Llamas, for tests and for `bench serve`: untrained, but their greedy tokens are decisive and depend on the
cache."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_kvq.bench.models.checkpoint import SPECIAL_TOKENS, LlamaShape, save_checkpoint
from vllm_kvq.bench.models.tokenizer import made_up_tokenizer

# Weight of attention's contribution to the residual stream, relative to the token's own embedding (1.0).
_ATTENTION_GAIN = 2.0
_MLP_GAIN = 1.0


def random_model(
    out_dir: str | Path,
    *,
    hidden: int = 256,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 512,
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    logit_scale: float = 30.0,
    intermediate: int | None = None,
    max_position: int = 4096,
    score_std: float = 2.0,
) -> Path:
    """Write a random Llama and its tokenizer into `out_dir` and return that path.

    `score_std`: standard deviation of an attention score before softmax. At 1, attention is an average of everything
    and cached keys hardly matter; far above 1, one key dominates and the values of the others don't matter. About
    n / exp(score_std^2) of n tokens are read.

    logits ~ N(0, logit_scale^2): the two largest of 512 then lie `logit_scale / 3.5` apart on average and
    within 1e-2 of each other once in about 800 tokens at the default scale. The special tokens' logits are
    0, so greedy decoding never stops early. Equal arguments give equal files.
    """
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    shape = LlamaShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate or 2 * hidden,
        vocab=vocab,
        max_position=max_position,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in shape.parameters():
        norm = len(size) == 1
        std = 1.0 if norm else _std(name, size, score_std)
        weights[name] = torch.ones(size) if norm else std * torch.randn(size, generator=generator)
    weights["lm_head.weight"] *= logit_scale
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    path = Path(out_dir)
    save_checkpoint(path, shape, weights, made_up_tokenizer(vocab), torch_dtype)
    return path


def _std(name: str, size: tuple[int, ...], score_std: float) -> float:
    """Unit variance out for unit variance in (1/sqrt(fan in)), times this tensor's gain."""
    if name.endswith("embed_tokens.weight"):
        return 1.0
    gain = 1.0
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        gain = score_std**0.5
    elif name.endswith("o_proj.weight"):
        gain = _ATTENTION_GAIN
    elif name.endswith("down_proj.weight"):
        gain = _MLP_GAIN
    return gain / size[-1] ** 0.5

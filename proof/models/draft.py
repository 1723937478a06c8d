"""Drafts for a random Llama (`random_model`): checkpoints that guess many of its tokens right, and some wrong.

`draft_model` is the target itself with noise on its weights. The EAGLE heads are made of the target's layers too:
they leave the target's hidden state aside and run on the embeddings, so that a noiseless `eagle` misses only the
first token of the prompt. An `eagle3` head sees embeddings only through attention and rarely guesses right.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

METHODS = ("draft_model", "eagle", "eagle3")
NOISE = 0.1
"""Relative noise on the weights with which about half of all drafts are rejected."""


def random_draft(out_dir: str | Path, target: str | Path, *, method: str = "draft_model", noise: float = NOISE) -> Path:
    """Write a draft for `target` into `out_dir` and return that path: the `model` of a speculative config."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    target, path = Path(target), Path(out_dir)
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(target / name, path / name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    weights = _disturbed(load_file(target / "model.safetensors"), noise)
    if method != "draft_model":
        head = _eagle if method == "eagle" else _eagle3
        weights = head(weights, config)
        config["architectures"] = ["LlamaForCausalLM" + ("Eagle3" if method == "eagle3" else "")]
        config = {"model_type": "eagle", "architectures": config["architectures"], "method": method, "model": config}
        config["model"]["model_type"] = "llama"
    save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _disturbed(weights: dict[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """Matrices with noise; norms and embeddings as they are."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: w
        if w.ndim == 1 or "embed" in name
        else w + (noise * w.float().std() * torch.randn(w.shape, generator=generator)).to(w.dtype)
        for name, w in weights.items()
    }


def _eagle(weights: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """fc(embedding, hidden) = embedding; the first layer has no norm before its attention."""
    hidden = config["hidden_size"]
    eye = torch.eye(hidden, dtype=weights["lm_head.weight"].dtype)
    left_out = ("lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
    kept = {k.removeprefix("model."): v for k, v in weights.items() if k not in left_out}
    return {**kept, "fc.weight": torch.cat([eye, torch.zeros_like(eye)], dim=1)}


def _eagle3(weights: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """One layer whose attention reads (embedding, hidden); its residual comes from the target's last hidden states."""
    hidden, kept = config["hidden_size"], {}
    for name, w in weights.items():
        if name.startswith("model.layers.0."):
            name = "midlayer." + name.removeprefix("model.layers.0.")
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                w = torch.cat([w, torch.zeros_like(w)], dim=1)
            kept[name] = w
    eye = torch.eye(hidden, dtype=weights["lm_head.weight"].dtype)
    config["num_hidden_layers"] = 1
    # the second name is the V2 model runner's
    config["eagle_config"] = {key: [0, 1, 2] for key in ("eagle_aux_hidden_state_layer_ids", "layer_ids")}
    return {
        **kept,
        "midlayer.hidden_norm.weight": torch.ones(hidden, dtype=eye.dtype),
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden, dtype=eye.dtype), eye], dim=1),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
    }

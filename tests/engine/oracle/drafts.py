"""A tiny model with an MTP layer: Ernie 4.5, from its real configuration class."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def mtp_model(path: Path) -> Path:
    """Random weights; the MTP layer is the first layer again, applied only to the embeddings."""
    from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

    config = Ernie4_5_MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    generator = torch.Generator().manual_seed(1)
    network = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, p in network.named_parameters():
            if p.ndim > 1:
                gain = 30.0 if "lm_head" in name else 2.0 if "o_proj" in name else 1.4 if "q_proj" in name else 1.0
                fan_in = 1 if "embed" in name else p.shape[-1]
                p.copy_(gain * torch.randn(p.shape, generator=generator) / fan_in**0.5)
    network.save_pretrained(path)
    file, first = path / "model.safetensors", "model.layers.0."
    weights = load_file(file)
    mtp = {f"model.mtp_block.0.{k.removeprefix(first)}": w for k, w in weights.items() if k.startswith(first)}
    mtp |= {f"model.mtp_{name}_norm.0.weight": torch.ones(128) for name in ("emb", "hidden")}
    mtp["model.mtp_linear_proj.0.weight"] = torch.cat([torch.eye(128), torch.zeros(128, 128)], dim=1)
    save_file({**weights, **{k: w.clone() for k, w in mtp.items()}}, file, metadata={"format": "pt"})
    return path

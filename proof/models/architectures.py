"""The kinds of models we know, as tiny random ones: which work and which are refused, in one table.

`tests/models` proves every row and `python -m proof models` prints docs/models.md from it. Configurations
are the real ones of Transformers with small numbers; what a checkpoint of the architecture declares (layer types,
biases, soft-caps) is left as it is.
"""

from __future__ import annotations

from proof.models.architecture import HIDDEN, POSITIONS, VOCAB, Architecture, hidden, llama_like, moe

_SLIDING = "models in which all layers have sliding-window attention"

WORKS: list[Architecture] = [
    Architecture("Llama", "LlamaConfig", llama_like(), "GQA, head size 64", replay=True),
    Architecture("Llama MHA", "LlamaConfig", llama_like(2, 2, 96), "MHA, head size 96"),
    Architecture("Llama MQA", "LlamaConfig", llama_like(4, 1, 80), "MQA, head size 80 (padded to 96)", replay=True),
    Architecture("Llama 112", "LlamaConfig", llama_like(2, 1, 112), "head size 112 (padded to 128)"),
    Architecture("Llama 128", "LlamaConfig", llama_like(4, 2, 128), "head size 128"),
    Architecture("Llama 192", "LlamaConfig", llama_like(2, 1, 192), "head size 192"),
    Architecture("Llama 256", "LlamaConfig", llama_like(2, 1, 256), "head size 256"),
    Architecture("Llama float16", "LlamaConfig", llama_like(), "16-bit model", dtype="float16"),
    Architecture("Llama bfloat16", "LlamaConfig", llama_like(), "16-bit model", dtype="bfloat16"),
    Architecture("Qwen2", "Qwen2Config", hidden(2, 64), "biases of query, key and value", replay=True),
    Architecture("Qwen3", "Qwen3Config", llama_like(), "query and key normalized per head", replay=True),
    Architecture(
        "Mistral",
        "MistralConfig",
        llama_like(sliding_window=None),
        "without sliding window (v0.2 and later)",
        replay=True,
    ),
    Architecture("Gemma", "GemmaConfig", llama_like(2, 1, 256, tie_word_embeddings=True), "MQA, head size 256"),
    Architecture(
        "Gemma-3",
        "Gemma3TextConfig",
        llama_like(num_hidden_layers=6, sliding_window=48),
        "one layer in six is packed, those with a sliding window keep 16 bits; no prefix caching",
        windows=True,
    ),
    Architecture(
        "Command R7B",
        "Cohere2Config",
        hidden(2, 64, num_hidden_layers=4, sliding_window=48, logit_scale=1.0, tie_word_embeddings=True),
        "one layer in four is packed and has no RoPE; the others keep 16 bits; no prefix caching",
        windows=True,
    ),
    Architecture("Phi-3", "Phi3Config", hidden(2, 96), "head size 96, fused projections", replay=True),
    Architecture(
        "Phi-2",
        "PhiConfig",
        hidden(2, 80, num_key_value_heads=2, partial_rotary_factor=0.4),
        "32 of 80 channels rotated, layer norms with biases, parallel MLP",
        polar="through Transformers",
    ),
    Architecture(
        "StableLM",
        "StableLmConfig",
        hidden(2, 64, partial_rotary_factor=0.25),
        "16 of 64 channels rotated",
        lossy="polar4",
    ),
    Architecture(
        "GPT-J",
        "GPTJConfig",
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "rotary_dim": 32},
        "interleaved RoPE on 32 of 64 channels",
        lossy="polar4",
    ),
    Architecture(
        "GPT-NeoX",
        "GPTNeoXConfig",
        hidden(2, 64, num_key_value_heads=2, rotary_pct=0.25),
        "16 of 64 channels rotated, fused projections",
        polar="through Transformers",
    ),
    Architecture(
        "GLM-4",
        "Glm4Config",
        llama_like(partial_rotary_factor=0.5),
        "interleaved RoPE on half the channels",
        lossy="polar4",
    ),
    Architecture(
        "Cohere Command R",
        "CohereConfig",
        hidden(2, 64, logit_scale=1.0, tie_word_embeddings=True),
        "interleaved RoPE, parallel MLP",
        lossy="polar4",
    ),
    Architecture(
        "StarCoder",
        "GPTBigCodeConfig",
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS},
        "MQA, learned positions, no RoPE",
        polar="no RoPE",
    ),
    Architecture(
        "OPT",
        "OPTConfig",
        hidden(2, 64, ffn_dim=HIDDEN, word_embed_proj_dim=128, do_layer_norm_before=True),
        "learned positions, no RoPE",
        polar="no RoPE",
    ),
    Architecture(
        "GPT-2",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS},
        "learned positions, no RoPE",
        polar="no RoPE",
    ),
    Architecture(
        "Mixtral",
        "MixtralConfig",
        llama_like(sliding_window=None, **moe(num_local_experts=4)),
        "mixture of experts",
    ),
    Architecture(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        llama_like(**moe(num_experts=4, moe_intermediate_size=64)),
        "mixture of experts",
    ),
    Architecture(
        "Llama with LoRA",
        "LlamaConfig",
        llama_like(),
        "an adapter on the attention projections",
        adapter=True,
        engine={"enable_lora": True, "max_lora_rank": 8},
    ),
    Architecture(
        "LLaVA",
        "LlavaConfig",
        {
            "text_config": llama_like(model_type="llama"),
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "projection_dim": 64,
            },
            "image_token_index": 3,
            "tie_word_embeddings": False,
        },
        "multimodal, used with text only",
        model="LlavaForConditionalGeneration",
        needs="torchvision",
        engine={"limit_mm_per_prompt": {"image": 0}},
    ),
    Architecture(
        "Qwen2-VL",
        "Qwen2VLConfig",
        {
            "text_config": hidden(
                2, 64, rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
            ),
            "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 128, "mlp_ratio": 2},
            "vision_start_token_id": 4,
            "vision_end_token_id": 5,
            "image_token_id": 6,
            "video_token_id": 7,
            "tie_word_embeddings": False,
        },
        "multimodal with three-part RoPE, used with text only",
        model="Qwen2VLForConditionalGeneration",
        needs="torchvision",
        engine={"limit_mm_per_prompt": {"image": 0, "video": 0}},
    ),
]

REFUSED: list[Architecture] = [
    Architecture(
        "Mistral v0.1",
        "MistralConfig",
        llama_like(sliding_window=64),
        "all layers have a sliding window",
        refused=_SLIDING,
    ),
    Architecture(
        "Gemma-2",
        "Gemma2Config",
        llama_like(),
        "soft-capped logits, sliding windows",
        refused="a soft-cap on attention logits",
    ),
    Architecture(
        "Gemma-3 with images",
        "Gemma3Config",
        {
            "text_config": llama_like(num_hidden_layers=6),
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
        "image tokens attend to later ones",
        refused="attention in both directions among image tokens",
        needs="torchvision",
    ),
    Architecture(
        "Gemma-4",
        "Gemma4TextConfig",
        llama_like(
            num_hidden_layers=6,
            global_head_dim=128,
            sliding_window=48,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=VOCAB,
        ),
        "larger heads in full layers than in those with a sliding window",
        refused="head sizes that differ per layer",
    ),
    Architecture(
        "gpt-oss",
        "GptOssConfig",
        llama_like(num_local_experts=4),
        "learned attention sinks, sliding windows",
        refused="learned attention sinks",
    ),
    Architecture(
        "BLOOM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 2},
        "ALiBi",
        refused="ALiBi",
    ),
    Architecture(
        "Falcon",
        "FalconConfig",
        hidden(2, 64, alibi=False),
        "vLLM's Falcon ignores `--kv-cache-dtype`",
        refused="Falcon models",
    ),
    Architecture("Falcon RW", "FalconConfig", hidden(2, 64, alibi=True), "ALiBi", refused="ALiBi"),
    Architecture(
        "DeepSeek-V2",
        "DeepseekV2Config",
        llama_like(
            head_dim=None,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=64,
            n_routed_experts=4,
        ),
        "latent attention (MLA)",
        refused="latent attention (MLA)",
    ),
    Architecture(
        "Jamba",
        "JambaConfig",
        llama_like(head_dim=None, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
        "attention and Mamba layers",
        refused="models with Mamba or linear attention layers",
    ),
    Architecture(
        "Granite 4",
        "GraniteMoeHybridConfig",
        llama_like(
            head_dim=None, layer_types=["mamba", "attention"], num_local_experts=0, mamba_n_heads=4, mamba_expand=2
        ),
        "attention and Mamba-2 layers",
        refused="models with Mamba or linear attention layers",
    ),
    Architecture(
        "Qwen3-Next",
        "Qwen3NextConfig",
        llama_like(layer_types=["linear_attention", "full_attention"], num_experts=4),
        "attention and linear attention layers",
        refused="models with Mamba or linear attention layers",
    ),
    Architecture(
        "Mamba",
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2},
        "no attention at all",
        refused="models with Mamba or linear attention layers",
    ),
    Architecture(
        "Whisper",
        "WhisperConfig",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "max_target_positions": 448,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
        "encoder and decoder",
        refused="encoder-decoder models",
    ),
    Architecture(
        "BERT",
        "BertConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2},
        "embeddings, encoder only",
        refused="pooling and embedding models",
        model="AutoModel",
    ),
    Architecture(
        "Qwen3 Embedding",
        "Qwen3Config",
        llama_like(),
        "embeddings from a decoder (`--runner pooling`)",
        refused="pooling and embedding models",
        engine={"runner": "pooling"},
    ),
    Architecture(
        "Llama 4",
        "Llama4TextConfig",
        llama_like(num_local_experts=2, attention_chunk_size=64, intermediate_size_mlp=128),
        "chunked local attention",
        refused="chunked local attention",
    ),
    Architecture(
        "Llama 32", "LlamaConfig", llama_like(head_dim=32), "head size 32", refused="head size 32 is not supported"
    ),
    Architecture(
        "Gemma-3n",
        "Gemma3nTextConfig",
        llama_like(
            num_kv_shared_layers=1,
            num_hidden_layers=2,
            layer_types=["full_attention", "full_attention"],
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=32,
        ),
        "layers that share their KV cache, sliding windows",
        refused="layers that share their KV cache",
    ),
]

ARCHITECTURES: list[Architecture] = WORKS + REFUSED


def named(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name)

"""The kinds of models that are served, as tiny random ones.

Configurations are the real ones of Transformers with small numbers; what a checkpoint of the architecture declares
(layer types, biases, soft-caps) is left as it is.
"""

from __future__ import annotations

from proof.models.architecture import HIDDEN, Architecture, gpt_like, hidden, llama_like, moe, vision

SERVED: list[Architecture] = [
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
        "one layer in six is packed, those with a sliding window keep 16 bits",
        windows=True,
    ),
    Architecture(
        "Command R7B",
        "Cohere2Config",
        hidden(2, 64, num_hidden_layers=4, sliding_window=48, logit_scale=1.0, tie_word_embeddings=True),
        "one layer in four is packed and has no RoPE; the others keep 16 bits",
        windows=True,
    ),
    Architecture(
        "gpt-oss",
        "GptOssConfig",
        llama_like(num_hidden_layers=4, num_local_experts=4, sliding_window=48),
        "learned attention sinks; one layer in two is packed, those with a sliding window keep 16 bits",
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
        gpt_like(rotary_dim=32),
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
        gpt_like(),
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
        gpt_like(),
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
            "vision_config": vision("clip_vision_model", projection_dim=64),
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

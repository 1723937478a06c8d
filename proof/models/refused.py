"""The kinds of models that are refused at start-up, each with a part of the error message."""

from __future__ import annotations

from proof.models.architecture import HIDDEN, VOCAB, Architecture, hidden, llama_like, vision

REFUSED: list[Architecture] = [
    Architecture(
        "Mistral v0.1",
        "MistralConfig",
        llama_like(sliding_window=64),
        "all layers have a sliding window",
        refused="models in which all layers have sliding-window attention",
    ),
    Architecture(
        "Gemma-3 with images",
        "Gemma3Config",
        {
            "text_config": llama_like(num_hidden_layers=6),
            "vision_config": vision("siglip_vision_model"),
        },
        "image tokens attend to later ones; with text only it is served (above)",
        refused="attention in both directions among image tokens",
        model="Gemma3ForConditionalGeneration",
    ),
    Architecture(
        "Gemma-4 with images",
        "Gemma4Config",
        {
            "text_config": llama_like(num_hidden_layers=6, use_bidirectional_attention="vision"),
            "vision_config": vision("gemma4_vision"),
        },
        "image tokens attend to later ones in the large models; with text only they are served (above)",
        refused="attention in both directions among image tokens",
        model="Gemma4ForConditionalGeneration",
    ),
    Architecture(
        "Llama with other KV heads in some layers",
        "LlamaConfig",
        llama_like(per_layer_config={1: {"num_key_value_heads": 1}}),
        "layers that would be packed have different numbers of KV heads, as pruned models do",
        refused="full-attention layers that have different KV heads",
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
        "attention and Mamba layers, which vLLM's CPU does not run",
        refused="hybrid models of the type 'jamba'",
    ),
    Architecture(
        "Mamba",
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2},
        "no attention at all",
        refused="models without attention layers",
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
        "Llama 32", "LlamaConfig", llama_like(head_dim=32), "head size 32", refused="head size 32 is not supported"
    ),
]

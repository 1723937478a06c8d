"""The statements about one kind of model, and the numbers of tiny configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Numbers = Mapping[str, Any]

VOCAB, HIDDEN, POSITIONS = 512, 128, 2048


@dataclass(frozen=True)
class Architecture:
    """A kind of model: a tiny configuration of it, and what the tests expect of it."""

    name: str
    config: str
    """Name of the configuration class in Transformers."""
    numbers: Numbers
    features: str
    refused: str | None = None
    """A fragment of the sentence at start-up; None: it works."""
    polar: str | None = None
    """A fragment of the sentence with which polar formats are refused although the others work."""
    lossy: str = "squat2"
    """The lossy format that the tests run: polar4 where rotary embeddings differ."""
    rope: str = "half"
    """How RoPE pairs channels, as in the option `pairing`; or `partial`, which the reference does not support."""
    replay: bool = False
    """Whether the reference replays the lossy tokens: for models whose attention can be replaced in Transformers."""
    model: str = "AutoModelForCausalLM"
    """The class in Transformers that makes the weights."""
    engine: Numbers = field(default_factory=dict)
    """Additional arguments of the engine."""
    dtype: str = "float32"
    windows: bool = False
    """Whether some layers have a sliding window: they are not packed."""
    hybrid: bool = False
    """Whether some layers keep a state of one size."""
    adapter: bool = False
    """Whether the tests add a LoRA adapter."""

    @property
    def slug(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name.lower()).strip("-")

    @property
    def vision(self) -> bool:
        """Whether it encodes images."""
        return "vision_config" in self.numbers

    @property
    def head_size(self) -> int:
        """The head size of the layers with full attention, if the others have their own."""
        text = self.text()
        if alone := getattr(text, "per_layer_config", None):
            kinds = getattr(text, "layer_types", None) or []
            text = alone[kinds.index("full_attention") if "full_attention" in kinds else 0]
        return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

    def build(self) -> Any:
        import transformers

        return getattr(transformers, self.config)(**self.numbers)

    def text(self) -> Any:
        """The configuration of its language model."""
        return self.build().get_text_config()


def llama_like(heads: int = 4, kv_heads: int = 2, head_dim: int | None = 64, **more: Any) -> dict[str, Any]:
    """Numbers under the names that most configurations use; None leaves the head size to hidden / heads."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        **({} if head_dim is None else {"head_dim": head_dim}),
        **more,
    }


def hidden(heads: int, head_size: int, **more: Any) -> dict[str, Any]:
    """For configurations without a head size of its own."""
    return llama_like(heads, head_dim=None, hidden_size=heads * head_size, **more)


def gpt_like(**more: Any) -> dict[str, Any]:
    """Numbers under the names that GPT-2 and its relatives use."""
    return {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, **more}


def moe(**names: int) -> dict[str, Any]:
    return {"num_experts_per_tok": 2, **names}


def mamba_2() -> dict[str, int]:
    """States so small that plain vLLM's blocks of 32 tokens are as large."""
    return {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}


def vision(model_type: str, **more: int) -> dict[str, Any]:
    """The encoder of images that are 28 pixels wide and high."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {"model_type": model_type, **sizes, "image_size": 28, "patch_size": 14, **more}

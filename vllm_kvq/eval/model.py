"""What the evaluation must know about a model before an engine starts: its files' hash, its tokenizer, its sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvq.eval.demo import demo_model
from vllm_kvq.integration.plan.model.weights import weight_bytes

DEMO = "demo"
SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")


@dataclass(frozen=True)
class Model:
    name: str
    """The name that the user writes."""
    folder: Path
    dtype: str
    tokenizer: Any
    vocabulary: int
    longest: int
    """The number of its positions."""
    token_bytes: int
    """Bytes of one token's keys and values in the plain cache."""
    head_size: int

    @classmethod
    def of(cls, name: str, dtype: str | None) -> Model:
        import torch
        import transformers

        folder = _folder(name)
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{name} can't be read as a model with a tokenizer: {why}") from None
        if not tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer of {name} does not report the positions of its tokens; use a fast tokenizer"
            )
        text = config.get_text_config()
        stored = dtype or str(text.dtype or config.dtype or "bfloat16").removeprefix("torch.")
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            name,
            folder,
            stored,
            tokenizer,
            text.vocab_size,
            getattr(text, "max_position_embeddings", None) or 1 << 30,
            2 * text.num_hidden_layers * heads * size * getattr(torch, stored).itemsize,
            size,
        )

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.folder)

    def digest(self) -> str:
        """A hash of every file that affects the model's output."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and path.suffix in SUFFIXES:
                with path.open("rb") as file:
                    digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _folder(name: str) -> Path:
    if name == DEMO:
        return demo_model()
    if (folder := Path(name)).is_dir():
        return folder
    from vllm_kvq.integration.preview.hub import hub_problem

    if problem := hub_problem(name):
        raise ValueError(problem)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{name!r} is neither a folder nor a model that can be downloaded: {first}") from None

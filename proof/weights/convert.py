"""A GGUF file as a Hugging Face checkpoint in bfloat16, which vLLM serves."""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from proof.weights.fetch import WeightsFailed
from proof.weights.table import Model

NEEDED = ("gguf", "accelerate", "transformers")
ABOUT = "LICENCE.txt"


def require_packages() -> None:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise WeightsFailed(
            f"reading GGUF files needs {' and '.join(missing)}: pip install 'vllm-kvq[weights]' (transformers comes "
            "with vLLM)"
        )


def checkpoint_of(model: Model, gguf: Path, target: Path) -> None:
    """The whole folder at once: it gets its name when everything is in it."""
    with tempfile.TemporaryDirectory(prefix=f"{model.name}-", suffix=".partial", dir=target.parent) as name:
        folder = Path(name) / model.name
        folder.mkdir()
        convert(gguf, folder)
        (folder / ABOUT).write_text(model.about(), encoding="utf-8")
        if target.exists():  # without a configuration, or it would not have been made again
            shutil.rmtree(target)
        folder.rename(target)


def is_complete(folder: Path) -> bool:
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def convert(gguf: Path, out: Path) -> None:
    """transformers reads the file and dequantizes it; what it writes is checked by nobody but those who use it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # it is in bfloat16 now, which its configuration does not know
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized = False
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if model.config.model_type.startswith("gemma"):
        begin_with_bos(tokenizer)
    tokenizer.save_pretrained(out)


def begin_with_bos(tokenizer: object) -> None:
    """Gemma's texts do, and without it the model babbles; transformers does not read that from a GGUF file."""
    from tokenizers.processors import TemplateProcessing

    bos, number = tokenizer.bos_token, tokenizer.bos_token_id  # type: ignore[attr-defined]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
    )

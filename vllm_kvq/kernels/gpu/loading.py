"""Who runs the Triton kernels: a GPU, an emulator of one, or Triton's interpreter.

Triton decides that when a kernel's module is imported, so all are imported here.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch

emulated: int | None = None
"""The compute capability, as in 90, of the GPU that an emulator in this process stands for: it is Triton's driver here,
and whoever installs it sets this first."""


def load() -> None:
    """Import the kernels. Without a GPU or an emulator they run in Triton's interpreter, whatever else uses Triton in
    this process."""
    importlib.import_module("triton")  # Triton itself, unaffected by what is set below
    before = os.environ.get("TRITON_INTERPRET")
    if "vllm_kvq.triton_kernels.lang" not in sys.modules and not torch.cuda.is_available() and emulated is None:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in ("step", "packing.kernel", "attend", "full_precision", "merge", "unpack"):
            importlib.import_module(f"vllm_kvq.triton_kernels.{name}")
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


def interpreted() -> bool:
    """Whether the kernels, once loaded, run in the interpreter."""
    return bool(importlib.import_module("vllm_kvq.triton_kernels.lang").INTERPRETED.value)

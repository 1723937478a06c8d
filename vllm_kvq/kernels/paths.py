"""Which implementation of `kernels.step.Step` serves a layer, why a faster one does not, and what is slow about it.

    GPU        on a GPU, if Triton or CUDA kernels support the format      gpu/step.py
    C++        on a CPU, if the library supports the format                cpu/step.py
    PyTorch    everywhere                                                  torch/step.py

A path serves either a format's whole step or none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.cpu import slow as slow_on_cpu
from vllm_kvq.kernels.cpu import step as cpu
from vllm_kvq.kernels.gpu import slow as slow_on_gpu
from vllm_kvq.kernels.gpu import step as gpu
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Prompts, Step
from vllm_kvq.kernels.torch.step import TORCH, Kernels, PlannedStep

CPP, PYTORCH = "C++", "PyTorch"
WISHES = ("auto", "torch")
"""What $VLLM_KVQ_KERNELS takes."""


@dataclass(frozen=True)
class Wish:
    """The request: where the tensors are, and the settings in the environment."""

    device_type: str
    kernels: str = "auto"
    """$VLLM_KVQ_KERNELS: "auto", or "torch" to disable C++."""
    gpu_path: bool = False
    """$VLLM_KVQ_GPU_PATH=1: the GPU's path on CPU tensors, under Triton's interpreter and the CUDA kernels' emulation.
    Slow, for tests."""

    def __post_init__(self) -> None:
        if self.kernels not in WISHES:
            raise ValueError(f"VLLM_KVQ_KERNELS is {self.kernels!r}; it is 'auto' or 'torch'")

    @classmethod
    def of(cls, device_type: str, environment: Mapping[str, str]) -> Wish:
        kernels = environment.get("VLLM_KVQ_KERNELS", "auto")
        return cls(device_type, kernels, environment.get("VLLM_KVQ_GPU_PATH") == "1")

    @property
    def on_gpu(self) -> bool:
        """Whether formats that support the GPU's path take it."""
        return self.device_type == "cuda" or self.gpu_path


@dataclass(frozen=True)
class Path:
    name: str
    """"GPU/Triton", "GPU/CUDA", "C++" or "PyTorch": one word, as the start-up line has it."""
    why: str | None = None
    """Why a faster path does not serve; None if there is none."""
    slow: str | None = None
    """What is slow about this format on this path, and what to use instead; None: nothing."""

    def __post_init__(self) -> None:
        if len(self.name.split()) != 1:
            raise ValueError(f"a path's name is one word, not {self.name!r}")

    @property
    def on_gpu(self) -> bool:
        return self.name.startswith("GPU")

    @property
    def rank(self) -> int:
        """The higher, the slower."""
        return 0 if self.on_gpu else (CPP, PYTORCH).index(self.name) + 1


def path_for(fmt: PageFormat, wish: Wish, capped: bool = False) -> Path:
    """`capped`: scores have a soft cap."""
    problems = []
    if wish.on_gpu:
        kernels = gpu.kernels_of(fmt, capped)
        if kernels is not None:
            return Path(f"GPU/{kernels.name}", slow=slow_on_gpu.slow(fmt))
        problems.append(gpu.why_not(fmt, capped))
    if wish.device_type == "cpu":
        problem = "VLLM_KVQ_KERNELS=torch disables C++" if wish.kernels == "torch" else cpu.why_not(fmt)
        if problem is None:
            return Path(CPP, "; ".join(problems) or None, slow_on_cpu.slow(fmt))
        problems.append(problem)
    return Path(PYTORCH, "; ".join(problems) or None)


def kernels_for(fmt: PageFormat, wish: Wish) -> Kernels:
    """The kernels that planned steps call, on any path except the GPU's."""
    return cpu.CPU if path_for(fmt, wish).name == CPP else TORCH


def step_for(
    path: Path,
    fmt: PageFormat,
    slots: SlotGeometry,
    num_spec: int,
    scale: float,
    device: torch.device,
    prompts: Callable[[bool], Prompts | None] = lambda merged: None,
    all_queries: Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float = 0.0,
) -> Step:
    """A layer's step on this path.

    `prompts(merged)` attend the new tokens of prompts, with their log-sum-exp if `merged`; the default leaves them to
    the path's own kernels. `all_queries` extends queries by those of other ranks that hold a copy of the same KV heads.
    `cap`: the soft cap of scores; 0: none. Layers on the GPU's path share a step, and with it the counters of its
    kernels, if their arguments are equal.
    """
    if path.on_gpu:
        return _gpu_step(fmt, slots, num_spec, scale, device, prompts(True), all_queries, cap)
    chosen = prompts(False)
    causal = None if chosen is None else chosen.causal
    if path.name == CPP:
        return cpu.CPUStep(fmt, slots, num_spec, scale, causal, all_queries, cap)
    return PlannedStep(fmt, slots, num_spec, scale, device, TORCH, causal, all_queries, cap)


@functools.cache
def _gpu_step(*arguments: Any) -> gpu.GPUStep:
    return gpu.GPUStep(*arguments)

"""Kernels by device; nothing here imports vllm.

`kernels_for(device)` answers with the functions that serve a device: C++ on a CPU, PyTorch elsewhere and wherever
$VLLM_KVQ_KERNELS is "torch". The PyTorch ones are what every other kernel is compared with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import pack as cpu_pack
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import DecodeStep
from vllm_kvq.kernels.torch import attend, pack
from vllm_kvq.kernels.torch.attend import Partial, merge

__all__ = ["Kernels", "Partial", "kernels_for", "merge"]


@dataclass(frozen=True)
class Kernels:
    name: str
    attend_packed: Callable[..., Partial]
    attend_raw: Callable[..., Partial]
    attend_into: Callable[..., None]
    attend_step: Callable[..., bool]
    all_packed: Callable[..., bool]
    pack: Callable[..., torch.Tensor | int]
    store: Callable[..., None]
    fit: Callable[..., torch.Tensor]
    decode: Callable[..., DecodeStep | None]
    """A layer's decode step without a plan; None where every step must be planned."""


TORCH = Kernels(
    "torch",
    attend.attend_packed,
    attend.attend_raw,
    attend.attend_into,
    attend.attend_step,
    attend.all_packed,
    pack.pack,
    pack.store,
    pack.fit,
    lambda *_: None,
)
CPU = Kernels(
    "cpu",
    cpu.attend_packed,
    cpu.attend_raw,
    cpu.attend_into,
    cpu.attend_step,
    cpu.all_packed,
    cpu_pack.pack,
    cpu_pack.store,
    cpu_pack.fit,
    DecodeStep.create,
)


def kernels_for(device: torch.device) -> Kernels:
    wanted = os.environ.get("VLLM_KVQ_KERNELS", "auto")
    if wanted not in ("auto", "torch"):
        raise ValueError(f"VLLM_KVQ_KERNELS is {wanted!r}; it is 'auto' or 'torch'")
    if wanted == "auto" and device.type == "cpu":
        library()  # built and loaded now, not when the first request waits
        return CPU
    return TORCH

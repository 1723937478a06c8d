"""Pools beyond 2 and 4 GiB on the host's paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from large_pools import compare
from layer import Layer
from one_each import METHODS

from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPU, CPUStep
from vllm_kvq.kernels.torch.step import TORCH, Kernels, PlannedStep

needs_cpp = pytest.mark.skipif(library() is None, reason="no C++ compiler")


def planned(layer: Layer, kernels: Kernels) -> PlannedStep:
    return PlannedStep(layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu"), kernels)


@pytest.mark.parametrize("name", METHODS)
def test_pytorch(name: str) -> None:
    compare(name, lambda layer: planned(layer, TORCH))


@needs_cpp
@pytest.mark.parametrize("name", METHODS)
def test_cpp_by_a_plan(name: str) -> None:
    compare(name, lambda layer: planned(layer, CPU))


class InOneCall(CPUStep):
    """Decode steps must not fall back to a plan."""

    def decode(self, *arguments: Any) -> int | None:
        replaced = super().decode(*arguments)
        assert replaced is not None
        return replaced


@needs_cpp
@pytest.mark.parametrize("name", METHODS)
def test_cpp_in_one_call(name: str) -> None:
    compare(name, lambda layer: InOneCall(layer.fmt, layer.slots, layer.drafts, layer.scale))

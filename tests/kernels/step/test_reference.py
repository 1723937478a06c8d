"""Steps on the host compared with the reference cache, which knows only positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer import Layer
from one_each import KINDS, METHODS
from reference_trace import worst_error
from sharing_step import SharedStep

from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPUStep
from vllm_kvq.kernels.torch.step import PlannedStep

FORMATS = (*METHODS, "kivi4", "polar3")
"""Codes of four bits, and values of fewer bits than the keys have, too."""


def bound(name: str) -> float:
    """The C++ kernels' largest error: sums in another order now and then move a code, and a sketch's bit is large."""
    return 1e-2 if name == "qjl3" else 1e-3


@pytest.mark.parametrize("name", FORMATS)
def test_pytorch(name: str) -> None:
    def build(layer: Layer) -> PlannedStep:
        return PlannedStep(layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu"))

    assert worst_error(name, build) < 1e-5


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", FORMATS)
def test_cpp(name: str) -> None:
    def build(layer: Layer) -> CPUStep:
        return CPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale)

    assert worst_error(name, build) < bound(name)


@pytest.mark.parametrize("name", [*KINDS, "lossless"])
def test_sharing_layers(name: str) -> None:
    def pytorch(layer: Layer) -> SharedStep:
        return SharedStep(PlannedStep(layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu")))

    def cpp(layer: Layer) -> SharedStep:
        return SharedStep(CPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale))

    assert worst_error(name, pytorch) < 1e-5
    if library() is not None:
        assert worst_error(name, cpp) < bound(name)


@pytest.mark.parametrize("name", ["squat2", "lossless"])
def test_a_soft_cap(name: str) -> None:
    def pytorch(layer: Layer, cap: float = 2.0) -> PlannedStep:
        return PlannedStep(layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu"), cap=cap)

    def cpp(layer: Layer) -> CPUStep:
        return CPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale, cap=2.0)

    assert worst_error(name, pytorch, cap=2.0) < 1e-5
    assert worst_error(name, pytorch, cap=2.0, learned=True) < 1e-5
    if library() is not None:
        assert worst_error(name, cpp, cap=2.0) < 1e-3
    # the control
    assert worst_error(name, lambda layer: pytorch(layer, 0.0), cap=2.0) > 0.05


@pytest.mark.parametrize("name", ["squat2", "lossless"])
def test_learned_sinks(name: str) -> None:
    def pytorch(layer: Layer) -> PlannedStep:
        return PlannedStep(layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu"))

    def cpp(layer: Layer) -> CPUStep:
        return CPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale)

    def dropped(layer: Layer) -> PlannedStep:
        layer.caches = replace(layer.caches, learned=None)
        return pytorch(layer)

    assert worst_error(name, pytorch, learned=True) < 1e-5
    if library() is not None:
        assert worst_error(name, cpp, learned=True) < 1e-3
    # the control
    assert worst_error(name, dropped, learned=True) > 0.1

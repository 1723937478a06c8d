"""A GPU's step, with prompts computed by another kernel, compared with the reference: a prefix hit, drafts, chunks."""

from __future__ import annotations

import pytest
import torch
from layer import Layer
from reference_trace import worst_error
from sharing_step import SharedStep

from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.step import Prompts
from vllm_kvq.kernels.torch.attend import causal, whole


@pytest.mark.parametrize("name", ["squat2", pytest.param("innerq2", marks=pytest.mark.wide)])
def test_a_soft_cap_and_learned_sinks(name: str) -> None:
    """The cap in attention over packed tokens, over full-precision tokens, and over prompts. With neither of them: the
    layers below, and test_history.py."""

    def build(layer: Layer) -> GPUStep:
        return GPUStep(
            layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu"), Prompts(causal, whole), cap=2.0
        )

    assert worst_error(name, build, heads=1, share=2, decodes=2, cap=2.0, learned=True) < 2e-3


@pytest.mark.parametrize(
    "prompts", [Prompts(causal), pytest.param(None, marks=pytest.mark.wide)], ids=["other kernel", "own"]
)
def test_sharing_layers(prompts: Prompts | None) -> None:
    def build(layer: Layer) -> SharedStep:
        return SharedStep(GPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale, torch.device("cpu"), prompts))

    assert worst_error("squat2", build, heads=1, share=1, decodes=1) < 2e-3

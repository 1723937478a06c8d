"""Long chunks over a history that is unpacked once, compared with the reference; and what must not be unpacked."""

from __future__ import annotations

import pytest
import torch
from layer import Layer
from reference_trace import worst_error

from vllm_kvq.kernels.gpu import history
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.step import Prompts
from vllm_kvq.kernels.torch.attend import causal, whole

CPU = torch.device("cpu")


def build(layer: Layer) -> GPUStep:
    return GPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale, CPU, Prompts(causal, whole))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> list[history.Span]:
    """Every chunk of two tokens is long, pieces and rounds are single pages; the spans that were unpacked."""
    for name in ("ROWS", "PIECE_BYTES", "ROUND_BYTES"):
        monkeypatch.setattr(history, name, 2)
    seen: list[history.Span] = []
    whole_history = history.attend

    def attend(*arguments: object) -> object:
        seen.append(next(a for a in arguments if isinstance(a, history.Span)))
        return whole_history(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("vllm_kvq.kernels.gpu.step.attend_history", attend)
    return seen


@pytest.mark.parametrize("name", ["squat2", "innerq2"])
def test_chunks(name: str, small: list[history.Span]) -> None:
    assert worst_error(name, build, heads=2, share=1, decodes=1) < 2e-3
    assert small

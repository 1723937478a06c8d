"""Long chunks over a history that is unpacked once, compared with the reference; and what must not be unpacked."""

from __future__ import annotations

import functools

import pytest
import torch
from layer import Layer
from reference_trace import worst_error

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.gpu import history
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.step import Prompts
from vllm_kvq.kernels.torch.attend import causal, whole

CPU = torch.device("cpu")
wide = functools.partial(pytest.param, marks=pytest.mark.wide)


def build(layer: Layer) -> GPUStep:
    return GPUStep(layer.fmt, layer.slots, layer.drafts, layer.scale, CPU, Prompts(causal, whole))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> list[history.Span]:
    """Every chunk of two tokens is long, pieces are single pages; the spans that were unpacked."""
    for name in ("ROWS", "WORK", "PIECE_BYTES"):
        monkeypatch.setattr(history, name, 2)
    seen: list[history.Span] = []
    whole_history = history.attend

    def attend(*arguments: object) -> object:
        seen.append(next(a for a in arguments if isinstance(a, history.Span)))
        return whole_history(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("vllm_kvq.kernels.gpu.step.attend_history", attend)
    return seen


@pytest.mark.parametrize("name", ["squat2", wide("innerq2"), wide("klt3")])
def test_chunks(name: str, small: list[history.Span]) -> None:
    assert worst_error(name, build, heads=2, share=1, decodes=1) < 2e-3
    assert small


def prompted(step: GPUStep | None = None) -> tuple[Layer, GPUStep]:
    """A layer of one request with a page of packed tokens."""
    fmt = get_format("kivi2").bind(Geometry(64, 64, torch.float32), {"W": 32, "S": 4})
    layer = Layer(fmt, 1, tokens=192, heads=1, share=1)
    step = step or build(layer)
    layer.run(step, [100], *layer.random(100, 0))
    return layer, step


def test_what_is_not_unpacked(small: list[history.Span]) -> None:
    """A history that is empty, a decode step, and pages that were never packed, which the kernels skip."""
    layer, step = prompted()
    assert not small, "a first chunk has no history"
    layer.run(step, [2], *layer.random(2, 1))
    assert [(span.low, span.high) for span in small] == [(4, 64)]
    small.clear()
    layer.run(step, [1], *layer.random(1, 2))
    assert not small, "a decode step"
    layer.caches.pages[:, 0] = 0
    layer.run(step, [2], *layer.random(2, 3))
    assert not small, "no page is packed"
    assert not int(step.faults[0])


def test_a_damaged_page_is_counted(small: list[history.Span]) -> None:
    """The first layer's pages decide; if another layer's are damaged, the engine stops instead of answering."""
    layer, step = prompted()
    other, _ = prompted(step)
    other.caches.pages[int(other.tables[0][0, 0]), 0, 0] ^= 1
    batch = layer.batch([2])
    for each in (layer, other):
        query, key, value = each.random(2, 1)
        assert int(step.faults[0]) == 0
        step.run(batch, each.caches, query, key, value, torch.empty_like(query))
    assert len(small) == 2
    assert int(step.faults[0]) == 2, "both slabs"

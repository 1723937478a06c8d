"""A request whose sidecar holds other tokens stops the step on the host's paths, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from damaged import DAMAGES, DRAFTS, after_prompts, put, same
from layer import Layer

from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPU, CPUStep
from vllm_kvq.kernels.slots import MAGIC
from vllm_kvq.kernels.step import Step
from vllm_kvq.kernels.torch.step import TORCH, Kernels, Planned, PlannedStep


def planned(kernels: Kernels) -> Callable[[Layer], Step]:
    return lambda x: PlannedStep(x.fmt, x.slots, DRAFTS, x.scale, torch.device("cpu"), kernels)


needs_cpp = pytest.mark.skipif(library() is None, reason="no C++ compiler")
PATHS = [
    pytest.param(planned(TORCH), id="PyTorch"),
    pytest.param(planned(CPU), id="C++ by a plan", marks=needs_cpp),
    pytest.param(lambda x: CPUStep(x.fmt, x.slots, DRAFTS, x.scale), id="C++ in one call", marks=needs_cpp),
]


@pytest.mark.parametrize("build", PATHS)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_step_raises(damage: str, bad: int, build: Callable[[Layer], Step]) -> None:
    layer, sound = after_prompts(2), after_prompts(2)
    step, data = build(layer), layer.random(2, 1)
    want = sound.run(step, [1, 1], *data)

    context = layer.held[bad]
    header = DAMAGES[damage](context)
    put(layer, bad, header)
    before = [layer.blocks(i) for i in range(2)]
    output = torch.full_like(data[0], 7.0)
    with pytest.raises(RuntimeError) as raised:
        step.run(layer.batch([1, 1]), layer.caches, *data, output)
    says = str(raised.value)
    if "no unit" in damage:
        assert f"resumes at {header[1]}, not at a multiple of 32 tokens" in says
    else:
        magic, start, upcoming = header
        assert f"magic {magic:#x}, positions from {start}, next position {upcoming}, but {context} tokens" in says
    assert all(same(layer.blocks(i), before[i]) for i in range(2))
    assert output.eq(7).all()

    # the other request has not been touched
    well = 1 - bad
    alone = [x[well : well + 1] for x in data]
    got = layer.run(step, [int(i == well) for i in range(2)], *alone)
    torch.testing.assert_close(got, want[well : well + 1], rtol=1e-5, atol=1e-6)
    assert same(layer.blocks(well), sound.blocks(well))


@pytest.mark.parametrize("build", PATHS)
def test_rejected_drafts_are_no_damage(build: Callable[[Layer], Step]) -> None:
    """A request is rolled back by up to `DRAFTS` tokens; the step says where it continues."""
    for rejected in range(DRAFTS + 1):
        layer = after_prompts(2)
        put(layer, 0, (MAGIC, 0, layer.held[0] + rejected))
        batch, data = layer.batch([1, 1]), layer.random(2, 1)
        output = torch.full_like(data[0], torch.nan)
        step = build(layer)
        step.run(batch, layer.caches, *data, output)
        assert output.isfinite().all()
        assert layer.headers().tolist() == [[MAGIC, 0, n + 1] for n in layer.held]
        assert (Planned in batch.kept) == isinstance(step, PlannedStep)


def test_every_layer_looks_at_its_own_headers() -> None:
    """What one layer planned for a batch serves the others only if their sidecars agree."""
    sound, damaged = after_prompts(2), after_prompts(2)
    step, data, batch = planned(TORCH)(sound), sound.random(2, 1), sound.batch([1, 1])
    step.run(batch, sound.caches, *data, torch.empty_like(data[0]))
    put(damaged, 1, DAMAGES["a token is missing"](damaged.held[1]))
    with pytest.raises(RuntimeError, match="stale sidecar"):
        step.run(batch, damaged.caches, *data, torch.empty_like(data[0]))

"""A request in pools of a server's size compared with the same request in small ones: equal bytes, equal answers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from layer import EDGES, LAYERS, Layer

from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.step import Step
from vllm_kvq.kernels.torch.step import TORCH, PlannedStep

STEPS = (127, 1, 66, 1)
"""New tokens of each step: a prompt, a decode step that completes a unit, a chunk that completes two, and a decode step
over five pages, one beyond every edge."""


def compare(name: str, build: Callable[[Layer], Step], heads: int = 2, *, prompt: bool = True) -> None:
    """`build` makes the step under test for a layer; without `prompt` PyTorch serves the first step."""
    fmt = calibrated(get_format(name).bind(Geometry(64, 32, torch.float32), {"W": 32, "S": 16}), heads)
    near, far = (Layer(fmt, heads=heads, share=1, far=far) for far in (False, True))
    block = LAYERS * far.slots.page_bytes
    at = far.tables[0].long() * block
    assert all(((at + block > edge) & (at < edge + (1 << 30))).any() for edge in EDGES)
    assert (far.tables[1].long() * block > EDGES[2]).any()  # a sidecar has few blocks
    step = build(near)
    reference = PlannedStep(fmt, near.slots, near.drafts, near.scale, torch.device("cpu"), TORCH)
    for i, new in enumerate(STEPS):
        data = near.random(new, i)
        serves = step if i or prompt else reference
        want, got = (layer.run(serves, [new], *data) for layer in (near, far))
        assert want.isfinite().all()
        assert torch.equal(got, want), f"step {i}"
        for kind, a, b in zip(("pages", "sidecar", "sinks"), near.blocks(0), far.blocks(0), strict=True):
            assert a.any()
            assert torch.equal(a, b), f"{kind} after step {i}"

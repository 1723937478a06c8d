"""On a GPU's path a request whose sidecar holds other tokens is counted and skipped, and the others are served."""

from __future__ import annotations

import torch
from damaged import DAMAGES, DRAFTS, after_prompts, put, same

from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.slots import MAGIC

WELL = {"as it should be": 0, "a draft was rejected": 1, "all drafts were rejected": DRAFTS}


def test_damaged_requests_are_counted_and_left_alone() -> None:
    names = [*list(WELL)[:1], *DAMAGES, *list(WELL)[1:]]
    layer, sound = after_prompts(len(names)), after_prompts(len(names))
    for i, name in enumerate(names):
        damaged = name in DAMAGES
        header = DAMAGES[name](layer.held[i]) if damaged else (MAGIC, 0, layer.held[i] + WELL[name])
        put(layer, i, header)
        put(sound, i, (MAGIC, 0, layer.held[i]) if damaged else header)
    before = [layer.blocks(i) for i in range(len(names))]
    step, control = (GPUStep(x.fmt, x.slots, DRAFTS, x.scale, torch.device("cpu")) for x in (layer, sound))
    ones, data = [1] * len(names), layer.random(len(names), 1)
    got, want = layer.run(step, ones, *data), sound.run(control, ones, *data)
    assert control.faults.tolist() == [0, 0]
    for i, name in enumerate(names):
        assert got[i].isfinite().all()
        if name in DAMAGES:
            assert same(layer.blocks(i), before[i]), f"written to: {name}"
        else:
            assert torch.equal(got[i], want[i]), name
            assert same(layer.blocks(i), sound.blocks(i)), name
    assert step.faults.tolist() == [len(DAMAGES), 0]

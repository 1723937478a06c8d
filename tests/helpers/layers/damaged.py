"""Headers of sidecars that belong to other tokens, and those that a step must accept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from layer import Layer

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.page import MAGIC as PAGE_MAGIC
from vllm_kvq.kernels.slots import MAGIC
from vllm_kvq.kernels.torch.step import TORCH, PlannedStep

DRAFTS = 2
PROMPTS = (90, 70)
"""Tokens of a request before the step, in turn; none of them is a multiple of a unit."""
UNIT = 32

Header = tuple[int, int, int]
"""Magic, first own position, next position."""

DAMAGES: dict[str, Callable[[int], Header]] = {
    "a token is missing": lambda context: (MAGIC, 0, context - 1),
    "more drafts than there are were rejected": lambda context: (MAGIC, 0, context + DRAFTS + 1),
    "another magic number": lambda context: (MAGIC ^ 1, 0, context),
    "a page's magic number": lambda context: (PAGE_MAGIC, 0, context),
    "the start is no unit's": lambda context: (MAGIC, 1, context),
    "the start is beyond the context": lambda context: (MAGIC, (context // UNIT + 1) * UNIT, context),
    "the start is before the first token": lambda context: (MAGIC, -UNIT, context),
}
"""What is wrong -> the header, from the request's context."""


def after_prompts(requests: int) -> Layer:
    fmt = get_format("squat2").bind(Geometry(64, 32, torch.float32), {"W": 32, "S": 16})
    layer = Layer(fmt, requests, tokens=128, heads=1, drafts=DRAFTS)
    prompts = [PROMPTS[i % 2] for i in range(requests)]
    step = PlannedStep(fmt, layer.slots, DRAFTS, layer.scale, torch.device("cpu"), TORCH)
    layer.run(step, prompts, *layer.random(sum(prompts), 0))
    assert layer.headers().tolist() == [[MAGIC, 0, n] for n in prompts]
    return layer


def put(layer: Layer, request: int, header: Header) -> None:
    headers = layer.headers()
    headers[request] = torch.tensor(header, dtype=torch.int32)
    layer.put_headers(headers)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

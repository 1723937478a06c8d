"""Requests without a LoRA adapter next to some with one, on a CPU.

vLLM marks a token without an adapter by the index -1. Its PyTorch functions take that for the last adapter's place in
memory, so whoever has none gets the last one: wrong answers, and wrong keys and values in the prefix cache. Here such
tokens add nothing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import ADAPTERS, Moment, Patch

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

OPS, WRAPPER = "vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu"
EXPAND = tuple(f"{module}:{name}" for module in (OPS, WRAPPER) for name in ("bgmv_expand", "bgmv_expand_slice"))
"""The last product of each adapter, in both modules that call it by name."""


def add_nothing_without(_: VllmConfig | None = None) -> None:
    def make(own: Any) -> Any:
        @functools.wraps(own)
        def expand(
            inputs: torch.Tensor,
            weights: torch.Tensor,
            output: torch.Tensor,
            adapter: torch.Tensor,
            *more: Any,
            **named: Any,
        ) -> Any:
            return own(inputs.masked_fill((adapter < 0)[:, None], 0), weights, output, adapter, *more, **named)

        return expand

    for name in EXPAND:
        once(name, make)


WITHOUT = Patch(
    what="bgmv_expand and bgmv_expand_slice wrapped on a CPU",
    why="a request without an adapter gets the last one as soon as another request of its batch has one",
    until="its functions for CPUs know the index -1",
    needs=EXPAND,
    moment=Moment.LOADED,
    install=add_nothing_without,
    replaces=EXPAND,
    only=ADAPTERS,
    cpu_only=True,
)

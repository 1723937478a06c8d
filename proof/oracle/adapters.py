"""LoRA adapters of requests: vLLM's request for one, and what the reference's network adds for the tokens behind it.

Adapters lie next to a checkpoint and are numbered from 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from proof.oracle.trace import Request

ADAPTERS = 2
"""Adapters of a checkpoint."""
PREFIX = "base_model.model."

Pair = tuple[torch.Tensor, torch.Tensor]
"""The matrices A and B of one projection; alpha is the rank, so their product is added as it is."""


def folder_of(checkpoint: str | Path, number: int) -> Path:
    return Path(f"{checkpoint}-adapter-{number}")


def asked_for(request: Request, checkpoint: str) -> dict[str, Any]:
    """What `add_request` is given for the request's adapter, if it has one."""
    if not request.adapter:
        return {}
    from vllm.lora.request import LoRARequest

    number = request.adapter
    return {"lora_request": LoRARequest(f"adapter {number}", number, str(folder_of(checkpoint, number)))}


class Adapters:
    """The adapters of a checkpoint in a Transformers network: `with` them, rows of requests go through theirs."""

    def __init__(self, checkpoint: str, network: torch.nn.Module) -> None:
        self.checkpoint = checkpoint
        self.loaded: dict[int, dict[str, Pair]] = {}
        self.rows: list[tuple[int, slice]] = []
        for name, module in network.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(functools.partial(self._add, name))

    @contextmanager
    def of(self, rows: Sequence[tuple[Request | None, slice]]) -> Iterator[None]:
        """`rows`: which rows of the network's next input are a request's."""
        self.rows = [(asked.adapter, mine) for asked, mine in rows if asked is not None and asked.adapter]
        try:
            yield
        finally:
            self.rows = []

    def _add(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor) -> None:
        for number, mine in self.rows:
            pair = self._pairs(number).get(name)
            if pair is not None:
                out[:, mine] += inputs[0][:, mine] @ pair[0].T @ pair[1].T

    def _pairs(self, number: int) -> dict[str, Pair]:
        """By the projection's name in the network."""
        if number not in self.loaded:
            tensors = load_file(folder_of(self.checkpoint, number) / "adapter_model.safetensors")
            names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
            self.loaded[number] = {
                name.removeprefix(PREFIX): (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
                for name in names
            }
        return self.loaded[number]

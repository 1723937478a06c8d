"""What calls of the library have besides tensors: structs of numbers (csrc/cpu/call.h, csrc/cpu/step/decode.h)."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.cpu.fields import Fields
from vllm_kvq.kernels.cpu.layout import names
from vllm_kvq.kernels.cpu.library import isa
from vllm_kvq.kernels.slots import SlotGeometry


@functools.cache
def scores(scale: float, cap: float) -> torch.Tensor:
    """How a query's products with keys become scores. `cap`: the soft cap; 0: none."""
    return _filled(names().scores, {"scale": scale, "cap": cap}, "scores")


@functools.cache
def team(threads: int, isa: int) -> torch.Tensor:
    """The maximum number of threads, and an instruction set: its index in `library.ISAS`."""
    return _filled(names().team, {"threads": threads, "isa": isa}, "team")


def all_threads() -> torch.Tensor:
    """The threads that PyTorch uses, with the instruction set in use."""
    return team(torch.get_num_threads(), isa())


def companions(fmt: PageFormat, slots: SlotGeometry, num_spec: int) -> torch.Tensor:
    """How a layer's companions are laid out and used."""
    given = {
        "unit": fmt.unit,
        "window": fmt.W,
        "sinks": fmt.S,
        "drafts": num_spec,
        "ring": slots.ring,
        "ring_at": slots.ring_at,
        "state_at": slots.state_at,
        "header_at": slots.header_at,
        "state_rows": fmt.state_rows,
        "slots_per_block": slots.slots_per_block,
        "blocks": slots.sidecar_blocks,
    }
    return _filled(names().companions, given, "companions")


def _filled(fields: Fields, given: Mapping[str, float], what: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(fields.fill(given, what)), dtype=torch.uint8)

"""One layer's whole decode step in one C++ call (csrc/cpu/step/decode.h): no plan, no index tensors.

Serves steps whose requests all have history, and at most 1 + speculative tokens of new ones. The others are planned by
kernels/torch/plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.cpu.layout import bind, companions, supports
from vllm_kvq.kernels.cpu.library import isa, library
from vllm_kvq.kernels.slots import SlotGeometry

_NOT_DECODING = -1


@dataclass(frozen=True)
class DecodeBatch:
    """The requests of one step as vLLM holds them, int32 on the host; padded ones have no tokens or block 0."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    side_table: torch.Tensor
    sink_table: torch.Tensor
    """Empty where the format keeps no sinks."""


class DecodeStep:
    """The step of one layer. `create` answers None where the library does not serve the format."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry, num_spec: int, scale: float) -> None:
        bound, self._lib = bind(fmt), library()
        if bound is None or self._lib is None:
            raise ValueError(f"{fmt.name} has no C++ kernels here")
        self._constants = (bound, companions(fmt, slots, num_spec))
        self._scale, self._isa = scale, isa()

    @classmethod
    def create(cls, fmt: PageFormat, slots: SlotGeometry, num_spec: int, scale: float) -> DecodeStep | None:
        return None if not supports(fmt) else cls(fmt, slots, num_spec, scale)

    def run(
        self,
        batch: DecodeBatch,
        pages: torch.Tensor,
        sidecar: torch.Tensor,
        sinks: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int | None:
        """The number of elements that were replaced before packing; None, and nothing is done, for other steps.

        pages (blocks, H, record bytes) uint8, sidecar and sinks (blocks, elements); query and output (T, Hq,
        head_size), key and value (T, H, head_size), their last dimension dense. RuntimeError for a stale sidecar or
        an unpacked page, IndexError for an id beyond its cache.
        """
        replaced = self._lib.decode_step(  # type: ignore[union-attr]
            *self._constants,
            *(batch.query_start, batch.seq_lens, batch.table, batch.side_table, batch.sink_table),
            *(query, key.unsqueeze(1), value.unsqueeze(1), pages, sidecar, sinks, output),
            *(self._scale, torch.get_num_threads(), self._isa),
        )
        return None if replaced == _NOT_DECODING else int(replaced)

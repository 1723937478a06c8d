"""The layout of a layer's companions, its sidecar and sink pages.

Their blocks are divided into *slots* of one token's raw K and V (2 * H * head_size elements of the model's dtype); slot
s of a request lies in its block s // slots_per_block.

    sidecar   n_state slots     state rows, float32
              then R slots      ring: position p in slot p % R, R = W + P + speculative tokens
              header            i32 magic, first own position, next position
    sinks     S slots           position p in slot p

The header lies behind the slots of the first block, in bytes that are too few for a slot. Where a block has no such
bytes, the header takes slot 0, and the state begins in slot 1. (A slot of its own would often take a whole block more:
klt4's ring of 64 slots fills two blocks of 32.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvq.formats import PageFormat

MAGIC = 0x4B565153
HEADER_BYTES = 12


@dataclass(frozen=True)
class SlotGeometry:
    """The layout of one layer's companions."""

    heads: int
    head_size: int
    itemsize: int
    page_bytes: int
    ring: int
    sinks: int
    state_bytes: int

    def __post_init__(self) -> None:
        if self.slots_per_block < 1:
            raise ValueError(
                f"a page of {self.page_bytes} bytes has no room for one raw token; use a larger --block-size"
            )

    @classmethod
    def of(cls, fmt: PageFormat, heads: int, num_spec: int) -> SlotGeometry:
        return cls(
            heads,
            fmt.geometry.head_size,
            fmt.geometry.dtype.itemsize,
            heads * fmt.record_bytes,
            fmt.W + fmt.unit + num_spec,
            fmt.S,
            4 * fmt.state_rows * heads * fmt.geometry.d,
        )

    @property
    def slot_bytes(self) -> int:
        return 2 * self.heads * self.head_size * self.itemsize

    @property
    def slots_per_block(self) -> int:
        return self.page_bytes // self.slot_bytes

    @property
    def state_slots(self) -> int:
        return -(-self.state_bytes // self.slot_bytes)

    @property
    def header_at(self) -> int:
        """Bytes from the beginning of a request's first block to its header."""
        behind = self.slots_per_block * self.slot_bytes
        return behind if behind + HEADER_BYTES <= self.page_bytes else 0

    @property
    def state_at(self) -> int:
        return 0 if self.header_at else 1

    @property
    def ring_at(self) -> int:
        return self.state_at + self.state_slots

    @property
    def sidecar_blocks(self) -> int:
        return -(-(self.ring_at + self.ring) // self.slots_per_block)

    @property
    def sink_blocks(self) -> int:
        return -(-self.sinks // self.slots_per_block)

    # -- views of a pool, (blocks, elements) of the model's dtype ---------------------------------------------------
    def cut(self, blocks: torch.Tensor) -> torch.Tensor:
        """(blocks, slots per block, 2, heads, head_size)."""
        whole = blocks[:, : self.slots_per_block * self.slot_bytes // self.itemsize]
        return whole.unflatten(1, (-1, 2, self.heads, self.head_size))

    def headers(self, blocks: torch.Tensor) -> torch.Tensor:
        """(blocks, 3) int32: meaningful only in a request's first block."""
        at = self.header_at // self.itemsize
        return blocks[:, at : at + HEADER_BYTES // self.itemsize].view(torch.int32)

    def read_state(self, slots: torch.Tensor, block: torch.Tensor, slot: torch.Tensor, rows: int) -> torch.Tensor:
        """Reads states from blocks laid out by `cut`: (n, state_slots) locations -> (n, heads, rows, d) float32."""
        raw = slots[block, slot].flatten(1).view(torch.float32)[:, : self.state_bytes // 4]
        return raw.reshape(len(block), self.heads, rows, -1)

    def write_state(self, slots: torch.Tensor, block: torch.Tensor, slot: torch.Tensor, state: torch.Tensor) -> None:
        """The inverse for one request: (state_slots,) locations, (heads, rows, d) float32."""
        raw = torch.zeros(self.state_slots * self.slot_bytes // 4, device=state.device)
        raw[: self.state_bytes // 4] = state.flatten()
        slots[block, slot] = raw.view(slots.dtype).view(len(slot), *slots.shape[2:])

    def locate(self, table: np.ndarray, request: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block, slot in the block) of each request's slot; `table` is (requests, blocks)."""
        return table[request, slot // self.slots_per_block], slot % self.slots_per_block

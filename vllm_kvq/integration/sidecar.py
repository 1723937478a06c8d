"""Companion layers: where a packed layer keeps what isn't packed, in blocks that vLLM hands out and takes back.

A companion's blocks are cut into *slots* of one token's raw K and V (2 * H * head_size elements of the model's dtype);
slot s of a request lies in its block s // slots_per_block.

    sidecar   slot 0            header: i32 magic, first own position, next position
              1 .. n_state      state rows, float32
              then R slots      ring: position p in slot p % R, R = W + P + speculative tokens
    sinks     S slots           position p in slot p
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration.spec import CompanionSpec, SidecarSpec, SinkSpec

MAGIC = 0x4B565153
SIDECAR_SUFFIX = ".kvq_sidecar"
SINK_SUFFIX = ".kvq_sinks"
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


@dataclass(frozen=True)
class SlotGeometry:
    """How one layer's companions are cut."""

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
    def ring_at(self) -> int:
        return 1 + self.state_slots

    @property
    def sidecar_blocks(self) -> int:
        return -(-(self.ring_at + self.ring) // self.slots_per_block)

    @property
    def sink_blocks(self) -> int:
        return -(-self.sinks // self.slots_per_block)

    def locate(self, table: np.ndarray, request: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block, slot in the block) of each request's slot; `table` is (requests, blocks)."""
        return table[request, slot // self.slots_per_block], slot % self.slots_per_block


@dataclass
class CompanionMetadata:
    block_table: torch.Tensor


class CompanionBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CompanionMetadata:
        return CompanionMetadata(common_attn_metadata.block_table_tensor[:, : self.kv_cache_spec.blocks_per_request])


class CompanionBackend(AttentionBackend):
    """What vLLM asks of a layer's backend; a companion computes nothing."""

    @staticmethod
    def get_name() -> str:
        return "KVQ_COMPANION"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("a companion layer has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[CompanionBuilder]:
        return CompanionBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS


class Companion(torch.nn.Module, AttentionLayerBase):
    """A layer without weights that owns an entry in a KV cache group."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry) -> None:
        super().__init__()
        self.fmt, self.slots_geometry = fmt, slots
        self.kv_cache = torch.tensor([])
        self.slots = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CompanionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> CompanionSpec:
        raise NotImplementedError

    def _spec_fields(self) -> dict[str, Any]:
        # the model's dtype and not uint8: vLLM zeroes new blocks where a pool holds caches of several dtypes
        dtype, page = self.fmt.geometry.dtype, self.slots_geometry.page_bytes
        return {
            "block_size": self.fmt.N,
            "num_kv_heads": 1,
            "head_size": page // dtype.itemsize,
            "head_size_v": 0,
            "dtype": dtype,
            "tokens_per_state": self.fmt.N,
            "state_content_bytes": page,
        }

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep (blocks, slots per block, 2, heads, head_size) of the raw pool."""
        geo = self.slots_geometry
        self.kv_cache = kv_cache
        flat = kv_cache.flatten(1)[:, : geo.slots_per_block * geo.slot_bytes // geo.itemsize]
        self.slots = flat.view(self.fmt.geometry.dtype).unflatten(1, (-1, 2, geo.heads, geo.head_size))


class Sidecar(Companion):
    def __init__(self, fmt: PageFormat, slots: SlotGeometry, report: Callable[[int], None] | None = None) -> None:
        super().__init__(fmt, slots)
        self.report = report

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if self.report is not None:
            self.report(kv_cache.shape[0])

    def get_kv_cache_spec(self, vllm_config: Any) -> CompanionSpec:
        return SidecarSpec(
            **self._spec_fields(), blocks_per_request=self.slots_geometry.sidecar_blocks, window=self.fmt.W
        )

    def headers(self) -> torch.Tensor:
        """(blocks, 3) int32: the header slot of every block, meaningful in a request's first one."""
        return self.kv_cache.flatten(1)[:, : 12 // self.slots_geometry.itemsize].view(torch.int32)

    def read_state(self, block: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """(n, state_slots) locations -> (n * heads, state_rows, d) float32."""
        geo, fmt = self.slots_geometry, self.fmt
        raw = self.slots[block, slot].flatten(1).view(torch.float32)[:, : geo.state_bytes // 4]
        return raw.reshape(-1, fmt.state_rows, fmt.geometry.d)

    def write_state(self, block: torch.Tensor, slot: torch.Tensor, state: torch.Tensor) -> None:
        """The inverse for one request: (state_slots,) locations, (heads, state_rows, d) float32."""
        geo = self.slots_geometry
        raw = torch.zeros(geo.state_slots * geo.slot_bytes // 4, device=state.device)
        raw[: geo.state_bytes // 4] = state.flatten()
        self.slots[block, slot] = raw.view(self.fmt.geometry.dtype).view_as(self.slots[block, slot])


class Sinks(Companion):
    def get_kv_cache_spec(self, vllm_config: Any) -> CompanionSpec:
        return SinkSpec(**self._spec_fields(), blocks_per_request=self.slots_geometry.sink_blocks)

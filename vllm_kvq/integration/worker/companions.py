"""Companion layers: where a packed layer keeps what isn't packed, in blocks that vLLM hands out and takes back.

How its blocks are cut into slots: kernels/slots.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration.core.spec import CompanionSpec, SidecarSpec, SinkSpec
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.worker.layout import ONE_SIZE
from vllm_kvq.kernels.slots import SlotGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata
    from vllm.v1.worker.worker_base import WorkerBase

__all__ = ["Sidecar", "Sinks", "SlotGeometry"]

SIDECAR_SUFFIX = ".kvq_sidecar"
SINK_SUFFIX = ".kvq_sinks"


@dataclass
class CompanionMetadata:
    block_table: torch.Tensor


class CompanionBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: CompanionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CompanionMetadata:
        return CompanionMetadata(common_attn_metadata.block_table_tensor[:, : self.kv_cache_spec.blocks_per_request])


class CompanionBackend(AttentionBackend):
    """What vLLM asks of a layer's backend; a companion computes nothing."""

    @staticmethod
    def get_name() -> str:
        return "KVQ_COMPANION"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        raise NotImplementedError("a companion layer has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[CompanionBuilder]:
        return CompanionBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return ONE_SIZE


class Companion(torch.nn.Module, AttentionLayerBase):
    """A layer without weights that owns an entry in a KV cache group."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry, blocks_per_request: int) -> None:
        super().__init__()
        self.fmt, self.slots_geometry, self.blocks_per_request = fmt, slots, blocks_per_request
        self.kv_cache = torch.tensor([])
        self.blocks = torch.tensor([])
        """(blocks, elements) of the model's dtype."""

    @property
    def page_size_bytes(self) -> int:
        """As vLLM's specs call it."""
        return self.slots_geometry.page_bytes

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CompanionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CompanionSpec:
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
            "blocks_per_request": self.blocks_per_request,
        }

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache
        self.blocks = kv_cache.flatten(1).view(self.fmt.geometry.dtype)


class Sidecar(Companion):
    def __init__(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        served: Served,
        report: Callable[[int], None] | None = None,
        when_loaded: Callable[[WorkerBase], None] | None = None,
    ) -> None:
        """`report` hears how many blocks there are; `when_loaded` the worker, once the model's weights are loaded."""
        super().__init__(fmt, slots, served.sidecar_blocks)
        self.when_loaded = when_loaded
        self.copies, self.mean_page_bytes, self.report = served.copies, served.page_bytes, report

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if self.report is not None:
            self.report(kv_cache.shape[0])

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CompanionSpec:
        slots = self.slots_geometry
        return SidecarSpec(
            **self._spec_fields(),
            window=self.fmt.W,
            unit=self.fmt.unit,
            sinks=self.fmt.S,
            elements=2 * slots.heads * slots.head_size,
            copies=self.copies,
            mean_page_bytes=self.mean_page_bytes,
        )


class Sinks(Companion):
    def __init__(self, fmt: PageFormat, slots: SlotGeometry, served: Served) -> None:
        super().__init__(fmt, slots, served.sink_blocks)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CompanionSpec:
        return SinkSpec(**self._spec_fields())

"""KV cache specs of a packed layer and of its two companions, as vLLM's engine core sees them.

packed   one record per block and KV head, found again by prefix caching up to some tokens before a prompt's end
sidecar  `blocks_per_request` blocks per running request, private to it: state rows and the full-precision ring
sinks    the same for the first S tokens, but shared between requests by prefix caching

A companion has its packed layer's block size and page bytes, so that vLLM has nothing to unify or pad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvq.integration.core.manager import PackedManager, SidecarManager, SinkManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class PackedSpec(FullAttentionSpec):
    recomputed: int
    """Tokens at a request's end that no prefix hit covers: the request computes them itself."""

    @classmethod
    def merge(cls, specs: list[PackedSpec]) -> PackedSpec:
        """FullAttentionSpec's own names its fields one by one, and would lose ours."""
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("all packed layers in the same KV cache group must be the same")
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class CompanionSpec(CircularBufferSpec):
    blocks_per_request: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks_per_request < 1:
            raise ValueError(f"blocks_per_request is {self.blocks_per_request}; a companion holds at least one block")

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.blocks_per_request * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        # blocks_per_request entries are used, but the V1 runner indexes every group's row by position // block size
        return max(self.blocks_per_request, cdiv(max_len, self.block_size))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Companions of one kind share a block table, whatever the size of their pages."""
        others = kv_cache_specs.values()
        return all(type(s) is type(self) and s.blocks_per_request == self.blocks_per_request for s in others)


@dataclass(frozen=True, kw_only=True)
class SidecarSpec(CompanionSpec):
    window: int
    """W: the newest tokens, which are read in full precision."""
    unit: int
    """P: the number of tokens that are packed at once."""
    sinks: int
    """S: the first tokens, which stay in full precision."""
    elements: int
    """Numbers of one token in one layer on one rank: its keys and values."""
    copies: int
    """Packed layers times ranks: each block of the pool is one page in each of them."""
    mean_page_bytes: float
    """Bytes of such a page; options given by layer may make pages of several sizes."""

    def packed_tokens(self, tokens: int) -> int:
        """How many of a request's tokens its next step reads from packed pages."""
        return max(0, (tokens - self.window) // self.unit * self.unit - self.sinks)


@dataclass(frozen=True, kw_only=True)
class SinkSpec(CompanionSpec):
    @property
    def prefix_cacheable(self) -> bool:
        return True


def register() -> None:
    KVCacheSpecRegistry.register(PackedSpec, PackedManager, uniform_type_base_spec=FullAttentionSpec)
    KVCacheSpecRegistry.register(SinkSpec, SinkManager, uniform_type_base_spec=SinkSpec)
    KVCacheSpecRegistry.register(SidecarSpec, SidecarManager, uniform_type_base_spec=SidecarSpec)

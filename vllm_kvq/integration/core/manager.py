"""Who owns the blocks of packed layers and of their companions: vLLM's own block pool, through these managers (engine
core side)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.request import Request

NO_LIMIT = 1 << 62


class PackedManager(FullAttentionManager):
    """Pages that requests share. A hit ends before the request's last `recomputed` tokens.

    What a request computes itself fills its ring and is what the format is fitted to; what it finds is read packed.
    """

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: BlockHashList, max_length: int, kv_cache_group_ids: list[int], block_pool: BlockPool,
        kv_cache_spec: Any, *args: Any, **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:  # fmt: skip
        # Another group may have found less than the whole request already; the hashes tell how long it is at least.
        whole = len(block_hashes) * block_pool.hash_block_size - 1
        limit = max(min(max_length, whole - kv_cache_spec.recomputed), max_length - kv_cache_spec.recomputed, 0)
        return super().find_longest_cache_hit(
            block_hashes, limit, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )


class SidecarManager(CircularBufferManager):
    """Claims a request's blocks on admission; vLLM frees them on finish and preemption.

    A fresh sidecar must read as zeros: a zero header is how the worker recognises a new request.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.blocks_per_request = kv_cache_spec.blocks_per_request
        self._record_new_block_ids = self._wants_zeroing(bool(kwargs.get("needs_kv_cache_zeroing")))

    def _wants_zeroing(self, available: bool) -> bool:
        if not available:
            raise RuntimeError(
                "vLLM does not zero new KV cache blocks for this model; low-bit formats can't run without that"
            )
        return True

    def _claim_ring_block(self, request_id: str, record_for_zeroing: bool = True) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        if blocks:
            if len(blocks) != self.blocks_per_request:
                raise RuntimeError(
                    f"request {request_id} holds {len(blocks)} blocks instead of {self.blocks_per_request}"
                )
            return []
        new = self.block_pool.get_new_blocks(self.blocks_per_request)
        blocks.extend(new)
        if self._record_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(b.block_id for b in new)
        return new

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0 if self.req_to_blocks.get(request_id) else self.blocks_per_request


class SinkManager(SidecarManager):
    """Sink pages: one set per distinct first block, found by its hash, shared like any cached block.

    The i-th page of group g has the key (hash of block 0, g + i * KEY_STRIDE). Pages are written only by requests that
    start at position 0 and read only where they were written, so they need no zeroing. A hit is [pages, null, ...] for
    the whole length, or none; this group comes after the packed group, so that a sink page is evicted after its pages.
    """

    KEY_STRIDE = 1 << 16
    behind_hit = False
    """Whether a KV connector asks for what follows a hit, which has its sinks (patches/registered/connectors.py)."""

    def _wants_zeroing(self, available: bool) -> bool:
        return False

    @classmethod
    def look_behind_hit(cls, behind: bool) -> None:
        cls.behind_hit = behind

    @classmethod
    def _keys(cls, group_id: int, pages: int) -> list[int]:
        return [group_id + i * cls.KEY_STRIDE for i in range(pages)]

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        if self.req_to_blocks.get(request_id):
            return 0
        if new_computed_blocks:  # pages of a hit leave the free queue when they are touched
            return self._get_num_evictable_blocks(new_computed_blocks[: self.blocks_per_request])
        return self.blocks_per_request

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        size, pages = kv_cache_spec.block_size, kv_cache_spec.blocks_per_request
        miss: tuple[tuple[list[KVCacheBlock], ...], int] = tuple([] for _ in kv_cache_group_ids), 0
        length = max_length - size if drop_eagle_block else max_length
        length -= length % math.lcm(size, alignment_tokens)
        if cls.behind_hit:
            return tuple([block_pool.null_block] * (length // size) for _ in kv_cache_group_ids), max(length, 0)
        # the pages stand in the first entries of the row: a shorter hit has no room for them
        if length <= 0 or length // size < pages:
            return miss
        first = resolve_block_hashes(block_hashes, block_pool.hash_block_size, size)[0]
        keys = [key for g in kv_cache_group_ids for key in cls._keys(g, pages)]
        found = block_pool.get_cached_block(first, keys)
        if not found:
            return miss
        rest = [block_pool.null_block] * (length // size - pages)
        return tuple(found[i * pages : (i + 1) * pages] + rest for i in range(len(kv_cache_group_ids))), length

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        if not new_computed_blocks:
            return
        pages = list(new_computed_blocks[: self.blocks_per_request])
        if len(pages) != self.blocks_per_request or any(b.is_null for b in pages) or self.req_to_blocks[request_id]:
            raise RuntimeError(f"request {request_id} hit an incomplete set of sink pages")
        self.block_pool.touch(pages)
        self.req_to_blocks[request_id].extend(pages)
        self.num_cached_block[request_id] = 1

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int] = (),
    ) -> None:
        request_id, pool = request.request_id, self.block_pool
        hashed = len(request.block_hashes) * pool.hash_block_size
        if min(num_tokens, hashed) < self.block_size or self.num_cached_block.get(request_id):
            return
        first = resolve_block_hashes(request.block_hashes, pool.hash_block_size, self.block_size)[0]
        keys = self._keys(self.kv_cache_group_id, self.blocks_per_request)
        for key, block in zip(keys, self.req_to_blocks[request_id], strict=True):
            full = make_block_hash_with_group_id(first, key)
            # vLLM's cached-token statistics take the minimum over the groups
            block.set_block_hash(full, num_tokens=NO_LIMIT)
            pool.cached_block_hash_to_block.insert(full, block)
        self.num_cached_block[request_id] = 1

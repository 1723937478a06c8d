"""Which blocks sidecars and sinks get: our two managers over vLLM's own block pool, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.integration.core.manager import PackedManager, SidecarManager, SinkManager
from vllm_kvq.integration.core.spec import CompanionSpec, PackedSpec, SidecarSpec, SinkSpec

pytestmark = pytest.mark.engine
N, BLOCKS = 64, 30
SIDE, SINKS = 3, 2
"""Blocks of a request."""
RING = {"window": 32, "unit": 32, "sinks": 0, "elements": 256, "copies": 1, "mean_page_bytes": 1024.0}
HASHES = [bytes([i]) * 32 for i in range(8)]


def packed(recomputed: int) -> PackedSpec:
    return PackedSpec(
        block_size=N,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.uint8,
        tokens_per_state=N,
        state_content_bytes=1024,
        recomputed=recomputed,
    )


def spec(kind: type[CompanionSpec], blocks: int, **more: Any) -> CompanionSpec:
    return kind(
        block_size=N,
        num_kv_heads=1,
        head_size=256,
        head_size_v=0,
        dtype=torch.float32,
        tokens_per_state=N,
        state_content_bytes=1024,
        blocks_per_request=blocks,
        **more,
    )


def pool() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(BLOCKS, True, N)


def manager(kind: Any, of: CompanionSpec, blocks: Any, **more: Any) -> Any:
    arguments = {"enable_caching": True, "kv_cache_group_id": 2, "scheduler_block_size": N, **more}
    return kind(of, block_pool=blocks, **{"needs_kv_cache_zeroing": True, **arguments})


def wanted(of: Any, request: str, tokens: int, hit: list[Any]) -> int:
    return int(of.get_num_blocks_to_allocate(request, tokens, hit, len(hit) * N, len(hit) * N, tokens))


def asked(name: str, hashes: int) -> Any:
    return SimpleNamespace(request_id=name, block_hashes=HASHES[:hashes])


def found(blocks: Any, length: int, hashes: int = 8) -> tuple[list[Any], int]:
    """The hit of a request whose first tokens are those of HASHES."""
    pages, tokens = SinkManager.find_longest_cache_hit(
        HASHES[:hashes], length, [2], blocks, spec(SinkSpec, SINKS), False, N
    )
    return pages[0], tokens


def test_a_sidecar_is_claimed_once_and_zeroed() -> None:
    blocks = pool()
    sidecars = manager(SidecarManager, spec(SidecarSpec, SIDE, **RING), blocks)
    free = blocks.get_num_free_blocks()
    assert wanted(sidecars, "a", 10, []) == SIDE
    first = sidecars.allocate_new_blocks("a", 10, 10)
    assert len({b.block_id for b in first}) == SIDE
    assert blocks.get_num_free_blocks() == free - SIDE
    assert sidecars.new_block_ids == [b.block_id for b in first]
    # it does not grow with the request, and no other request shares it
    assert wanted(sidecars, "a", 5 * N, []) == 0
    assert sidecars.allocate_new_blocks("a", 5 * N, 5 * N) == []
    second = sidecars.allocate_new_blocks("b", 1, 1)
    assert not {b.block_id for b in first} & {b.block_id for b in second}
    sidecars.free("a")
    assert blocks.get_num_free_blocks() == free - SIDE
    assert wanted(sidecars, "a", 10, []) == SIDE


def test_a_sidecar_can_not_do_without_zeros() -> None:
    with pytest.raises(RuntimeError, match="does not zero new KV cache blocks"):
        manager(SidecarManager, spec(SidecarSpec, SIDE, **RING), pool(), needs_kv_cache_zeroing=False)


def test_a_torn_sidecar_is_an_error() -> None:
    sidecars = manager(SidecarManager, spec(SidecarSpec, SIDE, **RING), pool())
    sidecars.allocate_new_blocks("a", 10, 10)
    sidecars.req_to_blocks["a"].pop()
    with pytest.raises(RuntimeError, match="request a holds 2 blocks instead of 3"):
        sidecars.allocate_new_blocks("a", 10, 10)


def test_sinks_are_shared_once_their_block_is_complete() -> None:
    blocks = pool()
    sinks = manager(SinkManager, spec(SinkSpec, SINKS), blocks)
    assert wanted(sinks, "a", 10, []) == SINKS
    own = sinks.allocate_new_blocks("a", 10, 10)
    # written only by requests that start at position 0, and read only where they were written
    assert sinks.new_block_ids == []
    sinks.cache_blocks(asked("a", 0), N - 1)
    sinks.cache_blocks(asked("a", 1), N - 1)
    sinks.cache_blocks(asked("a", 0), N)
    assert found(blocks, 3 * N) == ([], 0)
    sinks.cache_blocks(asked("a", 1), N)
    sinks.cache_blocks(asked("a", 2), 2 * N)
    pages, tokens = found(blocks, 3 * N + 5)
    assert tokens == 3 * N
    # the pages are in the first entries of a row that is as long as the hit
    assert [b.block_id for b in pages] == [*(b.block_id for b in own), 0]
    # a shorter hit has no room for them, and another first block has other sinks
    assert found(blocks, 2 * N)[1] == 2 * N
    assert found(blocks, 2 * N - 1) == found(blocks, N) == found(blocks, 0) == ([], 0)
    other = SinkManager.find_longest_cache_hit(HASHES[1:], 3 * N, [2], blocks, spec(SinkSpec, SINKS), False, N)
    assert other == (([],), 0)
    assert SinkManager.find_longest_cache_hit(HASHES, 3 * N, [3], blocks, spec(SinkSpec, SINKS), False, N)[1] == 0


def test_a_hit_holds_the_pages_of_the_one_before() -> None:
    blocks = pool()
    sinks = manager(SinkManager, spec(SinkSpec, SINKS), blocks)
    own = sinks.allocate_new_blocks("a", 10, 10)
    sinks.cache_blocks(asked("a", 3), 3 * N)
    hit, tokens = found(blocks, 3 * N)
    # while the first request runs they are not in the free queue; afterwards admission has to count them
    assert wanted(sinks, "b", 4 * N, hit) == 0
    sinks.free("a")
    free = blocks.get_num_free_blocks()
    assert wanted(sinks, "b", 4 * N, hit) == SINKS
    sinks.add_local_computed_blocks("b", hit, tokens, 0)
    assert blocks.get_num_free_blocks() == free - SINKS
    assert sinks.req_to_blocks["b"] == own
    assert wanted(sinks, "b", 4 * N, hit) == 0
    assert sinks.allocate_new_blocks("b", 4 * N, 4 * N) == []
    # it does not cache them again
    sinks.cache_blocks(asked("b", 4), 4 * N)
    assert found(blocks, 3 * N)[0] == hit


def test_half_a_hit_is_an_error() -> None:
    blocks = pool()
    sinks = manager(SinkManager, spec(SinkSpec, SINKS), blocks)
    sinks.allocate_new_blocks("a", 10, 10)
    sinks.cache_blocks(asked("a", 3), 3 * N)
    hit, tokens = found(blocks, 3 * N)
    with pytest.raises(RuntimeError, match="request b hit an incomplete set of sink pages"):
        sinks.add_local_computed_blocks("b", [hit[0], blocks.null_block, blocks.null_block], tokens, 0)


def test_an_evicted_page_costs_the_hit() -> None:
    blocks = pool()
    sinks = manager(SinkManager, spec(SinkSpec, SINKS), blocks)
    own = sinks.allocate_new_blocks("a", 10, 10)
    sinks.cache_blocks(asked("a", 3), 3 * N)
    sinks.free("a")
    assert blocks._maybe_evict_cached_block(own[1])
    assert found(blocks, 3 * N) == ([], 0)


def test_what_vllm_asks_of_the_specs() -> None:
    side, sinks = spec(SidecarSpec, SIDE, **{**RING, "window": 96}), spec(SinkSpec, SINKS)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100 * N))
    for of, blocks in ((side, SIDE), (sinks, SINKS)):
        # the blocks of one request, however long it is
        assert of.max_memory_usage_bytes(config) == blocks * 1024
        # vLLM indexes a row of the table by position // block size
        assert of.max_num_blocks_per_req(config, 100 * N) == 100
        assert of.max_num_blocks_per_req(config, N) == blocks
        assert of.is_uniform_with_collection({"a": of, "b": of})
    assert not side.is_uniform_with_collection({"a": side, "b": sinks})
    # a hit stops where the pages do: PackedManager leaves the window to be computed
    assert side.prefix_replay_tokens == 0
    assert (side.prefix_cacheable, sinks.prefix_cacheable) == (False, True)
    with pytest.raises(ValueError, match="at least one block"):
        spec(SinkSpec, 0)


@pytest.mark.parametrize("recomputed", [0, 32, N, 2 * N + 1])
def test_a_hit_leaves_the_newest_tokens_to_the_request(recomputed: int) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    blocks = pool()
    for name, block in zip(HASHES, blocks.get_new_blocks(8), strict=True):
        full = make_block_hash_with_group_id(name, 2)
        block.set_block_hash(full, num_tokens=N)
        blocks.cached_block_hash_to_block.insert(full, block)

    def hit(tokens: int, most: int) -> int:
        """What a request of that many tokens finds if another group has found at most `most`."""
        hashes = HASHES[: tokens // N]
        found = PackedManager.find_longest_cache_hit(hashes, most, [2], blocks, packed(recomputed), False, N)
        return found[1]

    for tokens in (1, N, N + 1, 3 * N, 3 * N + recomputed, 3 * N + recomputed + 1, 5 * N - 1, 8 * N):
        expected = max(0, tokens - 1 - recomputed) // N * N
        # vLLM asks for all but the last token
        assert hit(tokens, tokens - 1) == expected
        # after another group, which finds whole blocks, no page is lost beyond the granularity of the hashes
        after = hit(tokens, (tokens - 1) // N * N)
        assert expected - N <= after <= expected
        assert after == expected or tokens % N


def test_packed_layers_of_a_group_are_alike() -> None:
    assert PackedSpec.merge([packed(32), packed(32)]) == packed(32)
    with pytest.raises(AssertionError, match="must be the same"):
        PackedSpec.merge([packed(32), packed(0)])

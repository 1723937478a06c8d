"""What a router hears of an engine's cache: vLLM's own hashes of packed pages, and nothing of sidecars and sinks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from events import heard, stored, subscribed, vllms_hashes
from lab import Lab

from proof.models import named
from proof.models.architecture import Architecture
from proof.oracle.engines.forked import EngineProcess
from proof.oracle.trace import Request, Trace
from vllm_kvq.bench.servers.server import free_port

pytestmark = pytest.mark.engine
N = 64
PROMPT = 3 * N + 10
PAGES, PACKED_GROUP = PROMPT // N, 0


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(8, 512) for _ in range(PROMPT)) for _ in range(count)]


def events_of(lab: Lab, dtype: str, todo: list[tuple[int, ...]], model: str = "Llama", **more: Any) -> list[Any]:
    from vllm.config import KVEventsConfig

    arch, port = named(model), free_port("127.0.0.1")
    engine: dict[str, Any] = {"block_size": N, "max_model_len": 512, "dtype": arch.dtype, "skip_tokenizer_init": True}
    engine |= {"kv_events_config": KVEventsConfig(True, "zmq", f"tcp://*:{port}"), "kv_cache_dtype": dtype, **more}
    with subscribed(port) as socket, EngineProcess(str(lab.model(arch)), engine, {}) as process:
        for prompt in todo:
            process.run(Trace((Request("one", prompt, 4),)))
        return heard(socket, 1)


def test_a_router_hears_of_each_packed_page_once(lab: Lab) -> None:
    (prompt,) = prompts(1)
    plain, packed = (events_of(lab, dtype, [prompt]) for dtype in ("auto", "kitty2"))
    for events in (plain, packed):
        assert events == stored(events)
        hashes = [block for event in events for block in event.block_hashes]
        assert len(hashes) == len({*hashes}) == PAGES
        assert {event.block_size for event in events} == {N}
        assert {event.group_idx for event in events} == {PACKED_GROUP}
        assert [token for event in events for token in event.token_ids] == list(prompt[: PAGES * N])
    assert [event.block_hashes for event in packed] == [event.block_hashes for event in plain]
    assert [block for event in packed for block in event.block_hashes] == vllms_hashes(prompt, N)
    assert {event.kv_cache_spec_kind for event in packed} == {event.kv_cache_spec_kind for event in plain}


def test_a_router_hears_of_evicted_pages(lab: Lab) -> None:
    """Each page that is removed was stored before, and comes again with its prompt. A page of sinks is removed without
    having been stored, under the hash of the first page, without which nothing of the prompt is found."""
    first, *others = prompts(6)
    # a request takes 4 blocks for its pages and 12 for its sidecar and sinks
    events = events_of(lab, "kitty2", [first, *others, first], num_gpu_blocks_override=20, max_model_len=320)
    there: set[int] = set()
    removed: set[int] = set()
    for event in events:
        hashes = {*event.block_hashes}
        if type(event).__name__ == "BlockStored":
            assert not hashes & there, "a page that is there is stored again"
            there |= hashes
        elif event.group_idx == PACKED_GROUP:
            assert hashes <= there, "a page that is not there is removed"
            there -= hashes
            removed |= hashes
        else:
            assert hashes <= {batch.block_hashes[0] for batch in stored(events)}
    begin = {*stored(events)[0].block_hashes}
    assert begin & removed
    assert begin <= there


def test_a_router_hears_of_windows_as_other_groups(lab: Lab) -> None:
    """Packed pages are one group; what layers with windows keep are others, as in plain vLLM."""
    (prompt,) = prompts(1)
    events = stored(events_of(lab, "kitty2", [prompt], "Gemma-3"))
    (packed,) = [event for event in events if event.group_idx == PACKED_GROUP]
    assert (packed.block_size, packed.kv_cache_spec_kind) == (N, "full_attention")
    assert len(packed.block_hashes) == len({*packed.block_hashes}) == PAGES
    assert len(packed.token_ids) == PAGES * N
    # five layers of each six have windows, and keep only the last blocks of a prompt
    others = [event for event in events if event.group_idx != PACKED_GROUP]
    assert {event.kv_cache_spec_kind for event in others} == {"sliding_window"}
    assert {event.kv_cache_spec_sliding_window for event in others} == {window(named("Gemma-3"))}
    groups = [event.group_idx for event in others]
    assert len(groups) == len({*groups}) == 5
    assert all(len(event.block_hashes) * event.block_size < PAGES * N for event in others)


def window(arch: Architecture) -> int:
    return arch.build().sliding_window

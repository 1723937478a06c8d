"""What a router hears of an engine's cache: vLLM's own hashes of packed pages, and nothing of sidecars and sinks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from lab import Lab

from proof.models import named
from proof.oracle.forked import EngineProcess
from proof.oracle.trace import Request, Trace
from vllm_kvq.bench.server import free_port

pytestmark = pytest.mark.engine
N = 64
PROMPT = 3 * N + 10
PAGES, PACKED_GROUP = PROMPT // N, 0


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(8, 512) for _ in range(PROMPT)) for _ in range(count)]


@contextmanager
def subscribed(port: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 20)
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield socket


def heard(socket: zmq.Socket[bytes], enough: int) -> list[Any]:
    """The events until nothing has come for a second, once there are this many."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    decoder, events, deadline = msgspec.msgpack.Decoder(KVEventBatch), [], time.monotonic() + 60
    while time.monotonic() < deadline and (socket.poll(1000) or len(events) < enough):
        if socket.poll(0):
            events += decoder.decode(socket.recv_multipart()[-1]).events
    return events


def events_of(lab: Lab, dtype: str, todo: list[tuple[int, ...]], **more: Any) -> list[Any]:
    from vllm.config import KVEventsConfig

    arch, port = named("Llama"), free_port("127.0.0.1")
    engine: dict[str, Any] = {"block_size": N, "max_model_len": 512, "dtype": arch.dtype, "skip_tokenizer_init": True}
    engine |= {"kv_events_config": KVEventsConfig(True, "zmq", f"tcp://*:{port}"), "kv_cache_dtype": dtype, **more}
    with subscribed(port) as socket, EngineProcess(str(lab.model(arch)), engine, {}) as process:
        for prompt in todo:
            process.run(Trace((Request("one", prompt, 4),)))
        return heard(socket, 1)


def stored(events: list[Any]) -> list[Any]:
    return [event for event in events if type(event).__name__ == "BlockStored"]


def test_a_router_hears_of_each_packed_page_once(lab: Lab) -> None:
    (prompt,) = prompts(1)
    plain, packed = (stored(events_of(lab, dtype, [prompt])) for dtype in ("auto", "kitty2"))
    for events in (plain, packed):
        hashes = [block for event in events for block in event.block_hashes]
        assert len(hashes) == len({*hashes}) == PAGES
        assert {event.block_size for event in events} == {N}
        assert {event.group_idx for event in events} == {PACKED_GROUP}
        assert [token for event in events for token in event.token_ids] == list(prompt[: PAGES * N])
    assert [event.block_hashes for event in packed] == [event.block_hashes for event in plain]
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

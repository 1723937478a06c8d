"""A router's side of vLLM's KV events: it subscribes, listens, and knows the hashes that vLLM gives to blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq


@contextmanager
def subscribed(port: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 20)
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield socket


def heard(socket: zmq.Socket[bytes], enough: int) -> list[Any]:
    """The events, until there are at least this many and none has come for a second."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    decoder, events, deadline = msgspec.msgpack.Decoder(KVEventBatch), [], time.monotonic() + 60
    while time.monotonic() < deadline and (socket.poll(1000) or len(events) < enough):
        if socket.poll(0):
            events += decoder.decode(socket.recv_multipart()[-1]).events
    return events


def stored(events: list[Any]) -> list[Any]:
    return [event for event in events if type(event).__name__ == "BlockStored"]


def vllms_hashes(tokens: Sequence[int], block_size: int) -> list[Any]:
    """The hashes of the whole blocks of these tokens, as vLLM calculates and publishes them."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash, maybe_convert_block_hash

    init_none_hash(sha256)
    hashes: list[Any] = []
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block_tokens(sha256, parent, tokens[begin : begin + block_size]))
    return [maybe_convert_block_hash(block) for block in hashes]

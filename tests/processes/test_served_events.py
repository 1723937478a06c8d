"""What a router hears of a real server, `vllm serve` with pages of the default size."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import events
import pytest
import zmq

from vllm_kvq.bench.servers.server import Server, free_port

pytestmark = [pytest.mark.engine, pytest.mark.wide]
"""What an engine publishes is in every run: `tests/models/pool/test_kv_events.py`."""
FORMAT, MOST = "kitty2", 1024
Heard = tuple[Server, "zmq.Socket[bytes]"]


@pytest.fixture
def heard(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heard]:
    """The server, and what listens to its events from before its first request on."""
    port = free_port("127.0.0.1")
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    arguments = ["--kv-cache-dtype", FORMAT, "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", str(MOST)]
    arguments += ["--served-model-name", "tiny", "--kv-events-config", json.dumps(published)]
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(str(model), arguments, "127.0.0.1", free_port("127.0.0.1"), log)
    with events.subscribed(port) as socket, server:
        server.wait_until_healthy(480)
        yield server, socket


def metrics(server: Server, name: str) -> dict[str, str]:
    """The labels of an info metric."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=240) as answer:
        (labels,) = re.findall(rf"^{name}\{{(.*)\}} 1.0$", answer.read().decode(), re.M)
    return dict(re.findall(r'(\w+)="([^"]*)"', labels))


def complete(server: Server, prompt: list[int]) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_a_router_of_a_real_server_hears_of_each_packed_page_once(heard: Heard) -> None:
    """Under vLLM's own hashes, in blocks of the size that a router can read on /metrics."""
    server, socket = heard
    size = int(metrics(server, "vllm:kvq_info")["block_size"])
    assert f" N={size} " in server.read_log()
    rng = random.Random(3)
    prompt = [rng.randrange(8, 512) for _ in range(3 * size + 10)]
    pages = events.vllms_hashes(prompt, size)
    complete(server, prompt)
    first: list[Any] = events.heard(socket, 1)
    assert first == events.stored(first)
    assert [page for event in first for page in event.block_hashes] == pages
    assert {event.block_size for event in first} == {size}
    assert len({event.group_idx for event in first}) == 1
    # the last page has tokens of the window, which are never shared: whoever asks again computes and stores it again
    complete(server, prompt)
    again: list[Any] = events.heard(socket, 0)
    assert [page for event in again for page in event.block_hashes] == pages[-1:]

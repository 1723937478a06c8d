"""Benchmarks whose server dies, or does not answer, end in one sentence and the end of its log."""

from __future__ import annotations

import http.server
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.client import HTTPException, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq.bench.servers import capacity, serve, server
from vllm_kvq.bench.servers.capacity import in_flight
from vllm_kvq.bench.servers.server import HOST, Server, ServerError, free_port, watched

ROOT = Path(__file__).parents[2]
LOAD = capacity.Load(prompt=96, answer=32, requests=6, concurrency=4, cache_bytes=1 << 20)
DIES, LIVES = "print('out of memory'); raise SystemExit(3)", "import time; print('busy', flush=True); time.sleep(60)"
DEAD = ("the server exited with status 3 while it was asked", ("out of memory",))
Start = Callable[[str], Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a server that is the given Python program, and waits for its first words. Nobody listens at its URL."""
    monkeypatch.setattr(server, "DYING_SECONDS", 5)
    monkeypatch.setattr(server, "vllm_command", lambda: ["vllm"])
    started: list[Server] = []

    def go(program: str) -> Server:
        one = Server("model", [], HOST, free_port(HOST), tmp_path / f"{len(started)}.log")
        one.command = [sys.executable, "-c", program]
        started.append(one.__enter__())
        deadline = time.monotonic() + 60
        while not one.tail() and time.monotonic() < deadline:
            time.sleep(0.01)
        if program == LIVES:
            monkeypatch.setattr(server, "DYING_SECONDS", 0)
        return one

    yield go
    for one in started:
        one.stop()


def test_a_server_that_dies_under_a_load(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        capacity.measured("klt3", start(DIES), tmp_path, LOAD, tmp_path)
    assert (str(caught.value), caught.value.log_tail) == DEAD


def test_one_of_two_servers_dies(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose log says why is found, whichever it is."""
    dead, alive = start(DIES), start(LIVES)

    def turn(*_: object) -> serve.Turn:
        raise RemoteDisconnected("no answer")

    monkeypatch.setattr(serve, "take_turn", turn)
    monkeypatch.setattr(Server, "wait_until_healthy", lambda *_: None)
    monkeypatch.setattr(server, "DYING_SECONDS", 1)
    load = serve.Load([64], [1], 8, 1, 1)
    for plain, packed in ((dead, alive), (alive, dead)):
        monkeypatch.setattr(serve, "server", lambda *_, packed=packed: nullcontext(packed))
        with pytest.raises(ServerError) as caught:
            next(serve.against("kitty2", tmp_path, plain, load, {(64, 1): 1.0}, tmp_path))
        assert (str(caught.value), caught.value.log_tail) == DEAD


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (ConnectionRefusedError("refused"), "the server does not answer: refused"),
        (HTTPException(), "the server does not answer: HTTPException"),
        (ServerError("the server answered 500"), "the server answered 500"),
    ],
)
def test_a_server_that_lives_and_does_not_answer(failure: Exception, sentence: str, start: Start) -> None:
    with pytest.raises(ServerError) as caught, watched(start(LIVES)):
        raise failure
    assert (str(caught.value), caught.value.log_tail) == (sentence, ("busy",))


def test_what_a_client_said_is_kept(start: Start) -> None:
    with pytest.raises(ServerError) as caught, watched(start(LIVES)):
        raise ServerError("vllm bench serve exited with status 1", ["its own words"])
    assert caught.value.log_tail == ("its own words",)


def test_requests_without_an_answer(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refused them, and its log says why."""
    done: Any = subprocess.CompletedProcess([], 0, "", "")
    (tmp_path / "capacity-klt3.json").write_text(json.dumps({"completed": 5}))
    monkeypatch.setattr(capacity, "read_metrics", lambda url: {})
    monkeypatch.setattr(capacity, "load_command", lambda *_: [])
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    with pytest.raises(ServerError, match="5 of 6 requests were answered") as caught:
        capacity.measured("klt3", start(LIVES), tmp_path, LOAD, tmp_path)
    assert caught.value.log_tail == ("busy",)


def test_servers_on_a_gpu(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When one dies, the script goes on with the next."""
    spec = importlib.util.spec_from_file_location("gpu_serve", ROOT / "bench" / "gpu_serve.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_serve", script)
    spec.loader.exec_module(script)

    def ask(*_: object) -> list[serve.Turn]:
        raise RemoteDisconnected("no answer")

    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr(script, "server", lambda *_: nullcontext(start(DIES)))
    monkeypatch.setattr(Server, "wait_until_healthy", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu_serve.py", "--dry-run", "--caches", "auto,klt3", "--out", "times.csv"])
    monkeypatch.chdir(tmp_path)
    assert script.main() == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [x for cache in ("auto", "klt3") for x in (f"FAILED: {cache}: {DEAD[0]}", *DEAD[1])]


@pytest.mark.parametrize(("given", "space"), [(None, "2"), ("7", "7")])
def test_each_of_two_servers_has_a_cache_of_its_own(
    given: str | None, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", given)
    one = serve.server(tmp_path, "kitty2", serve.Load([64], [1], tokens=2, rounds=1, cold=1), tmp_path / "log")
    assert one.shown.startswith(f"VLLM_CPU_KVCACHE_SPACE={space} vllm serve ")


def test_one_answer_that_is_none_does_not_stop_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([HTTPException("half a line"), 2.0])

    def metrics(url: str) -> dict[str, float]:
        answer = next(answers, 2.0)
        if isinstance(answer, Exception):
            raise answer
        return {capacity.RUNNING: answer}

    monkeypatch.setattr(capacity, "read_metrics", metrics)
    monkeypatch.setattr(capacity, "SAMPLE_SECONDS", 0.01)
    with in_flight("http://x") as seen:
        deadline = time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen[:1] == [2.0]


class Answers(http.server.BaseHTTPRequestHandler):
    body = b""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(Answers.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://{HOST}:{one.server_port}"
        one.shutdown()


def message(tokens: int) -> bytes:
    return b"data: " + json.dumps({"usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "answered without a token"),
        (message(1) + message(2), "ended after 2 of 3 tokens"),
        (message(1) + b'data: {"error": {"message": "EngineCore died"}}\n\n', "answered: .*EngineCore died"),
        (message(1) + b'data: {"usa', 'answered: {"usa'),
    ],
)
def test_an_answer_that_ends_early(body: bytes, sentence: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "body", body)
    with pytest.raises(ServerError, match=sentence):
        serve.stream(url, [1, 2], 3)


def test_a_whole_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "body", message(1) + message(2) + message(3) + b"data: [DONE]\n\n")
    assert serve.stream(url, [1, 2], 3).step >= 0

"""`vllm-kvq bench capacity`: what is counted, what is refused, and two real servers."""

from __future__ import annotations

import csv
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq.bench.servers import capacity
from vllm_kvq.bench.servers.capacity import Found, Load, in_flight, judged, load_command, read_metrics
from vllm_kvq.bench.servers.server import ServerError
from vllm_kvq.cli.bench import capacity as command

LOAD = Load(prompt=96, answer=32, requests=6, concurrency=4, cache_bytes=1 << 20)
LOG = "(EngineCore pid=1) INFO [kv_cache_utils.py:2327] CPU KV cache size: 1,448 tokens, Maximum concurrency"
TIMES = {"p50_ttft_ms": 250.0, "p99_ttft_ms": 900.0, "p50_tpot_ms": 20.0, "p99_tpot_ms": 45.0}
SAID = {"completed": 6, "total_output_tokens": 192, "output_throughput": 50.0, **TIMES}
COUNTED = {capacity.PREEMPTIONS: 3.0, capacity.HITS: 64.0, capacity.QUERIES: 256.0}
FOUND = Found("klt3", 1448, 3.0, 50.0, (0.25, 0.9), (0.02, 0.045), 3, 0.25)


def test_what_a_server_did() -> None:
    assert judged("klt3", LOG, LOAD, SAID, COUNTED, [1.0, 3.0, 3.0, 4.0, 2.0]) == FOUND
    assert judged("klt3", LOG, LOAD, SAID, {}, [3.0]).hits == 0


@pytest.mark.parametrize(
    ("said", "seen", "log", "sentence"),
    [
        ({"completed": 5}, [1.0], LOG, "5 of 6 requests were answered by the server with klt3"),
        ({"total_output_tokens": 191}, [1.0], LOG, "klt3 returned 191 tokens, not 6 times 32"),
        ({}, [], LOG, "does not say what runs"),
        ({}, [1.0], "no line", "does not say what runs or what fits; vLLM's log has changed"),
    ],
)
def test_an_incomplete_load_is_no_result(said: dict[str, Any], seen: list[float], log: str, sentence: str) -> None:
    with pytest.raises(ServerError, match=sentence):
        judged("klt3", log, LOAD, SAID | said, COUNTED, seen)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"answer": 1}, "the answer at least 2"),
        ({"cache_bytes": 0}, "must be at least 1"),
        ({"concurrency": 7}, "6 requests are fewer than the 7 that are to run at once"),
    ],
)
def test_loads_that_are_none(wrong: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Load(**{"prompt": 96, "answer": 32, "requests": 6, "concurrency": 4, "cache_bytes": 1, **wrong})


class Metrics(http.server.BaseHTTPRequestHandler):
    running = iter([0, 2, 2, 5])

    def do_GET(self) -> None:
        now = next(Metrics.running, 0)
        text = (
            f'# HELP x\nvllm:num_requests_running{{engine="0"}} {now}.0\nvllm:num_requests_running{{engine="1"}} 1e0\n'
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write((text if now else "").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_engines_are_added_up_and_idle_moments_left_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "SAMPLE_SECONDS", 0.01)
    Metrics.running = iter([0, 2, 2, 5])
    with in_flight(url) as seen:
        deadline = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen == [3, 3, 6]
    Metrics.running = iter([4])
    assert read_metrics(url) == {capacity.RUNNING: 5}


def test_the_load_has_a_seed_and_the_server_its_bytes(tmp_path: Path) -> None:
    words = load_command("http://x", tmp_path, replace(LOAD, seed=7), tmp_path / "a.json")
    assert "--ignore-eos" in words
    said = {"seed": 7, "num-prompts": 6, "max-concurrency": 4, "random-input-len": 96, "random-output-len": 32}
    assert {name: int(words[words.index(f"--{name}") + 1]) for name in said} == said
    one = capacity.server(tmp_path, "kitty2", LOAD, tmp_path / "log", {"S": 8})
    assert "--kv-cache-memory-bytes 1048576" in one.shown
    assert '--additional-config \'{"kvq": {"S": 8}}\'' in one.shown
    # on a CPU it would count instead of the flag
    assert one.without == {"VLLM_CPU_KVCACHE_SPACE"}


def test_the_table_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Found("bf16", 448, 2.0, 25.0, (1.0, 2.0), (0.01, 0.02), 9, 0.0)
    asked: list[Any] = []

    def rows(formats: Any, model: Path, load: Load, folder: Path) -> Iterator[Found]:
        asked.append((formats, load))
        yield from (plain, FOUND)

    monkeypatch.setattr(capacity, "rows", rows)
    assert command.main(["demo", "--formats", "kitty2:S=8", "--cache-bytes", "1M", "--out", str(tmp_path)]) == 0
    assert asked == [([("kitty2", {"S": 8})], Load(512, 512, 32, 32, 1 << 20))]
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["bf16", "448", "2", "25.0", "1.00", "1.00", "2.00", "10.0", "20.0", "9", "0%"]
    assert second.split() == ["klt3", "1,448", "3", "50.0", "2.00", "0.25", "0.90", "20.0", "45.0", "3", "25%"]
    written = list(csv.DictReader((tmp_path / "capacity.csv").open()))
    assert [row["tokens_per_second"] for row in written] == ["25.0", "50.0"]
    assert command.main(["demo", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][1] == FOUND.document()


def test_a_server_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*_: Any) -> Iterator[Found]:
        raise ServerError("the server exited with status 1 before it was ready", ["out of memory"])
        yield

    monkeypatch.setattr(capacity, "rows", rows)
    assert command.main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "out of memory",
        "vllm-kvq bench capacity: the server exited with status 1 before it was ready",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["demo", "--cache-bytes", "much"], "'much' is not a size such as 80G or 512M"),
        (["demo", "--formats", "auto"], "--formats auto is bf16, which is always measured; name a cache"),
        (["demo", "--requests", "4"], "4 requests are fewer than the 32 that are to run at once"),
        (["demo", "--concurrency", "8"], "--concurrency; it is --batch here"),
        (["demo", "--context", "9000"], "positions, and requests take"),
        (["/nowhere"], "there is no folder '/nowhere'"),
    ],
)
def test_bad_input(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capacity, "rows", lambda *_: pytest.fail("a server would be started"))
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.wide
def test_two_real_servers(tmp_path: Path) -> None:
    words = ["--context", "96", "--tokens", "32", "--requests", "6", "--batch", "4", "--eager"]
    assert command.main(["demo", *words, "--cache-bytes", "1M", "--formats", "kitty2", "--out", str(tmp_path)]) == 0
    plain, packed = csv.DictReader((tmp_path / "capacity.csv").open())
    assert (plain["cache"], packed["cache"]) == ("bf16", "kitty2")
    # 1 MiB, and not what VLLM_CPU_KVCACHE_SPACE says
    assert 256 <= int(plain["tokens"]) < int(packed["tokens"]) < 4096
    assert 0 < float(plain["in_flight"]) <= float(packed["in_flight"]) <= 4
    assert "kvq: format=kitty2" in (tmp_path / "capacity-kitty2.log").read_text()

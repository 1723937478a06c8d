"""The soak's clients, measures and report fail where they must."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from proof.soak import main
from proof.soak.client import Answer, BadAnswer, place, problem
from proof.soak.load import MAX_LEN, Load, Order
from proof.soak.report import TOTAL, Report, Tally
from proof.soak.watch import Metrics, Trend, tree_rss, trend

GOOD = Answer({0: "abc"}, {0: "length"}, 3)
ORDER = Order((10, 11), 3)


def test_an_answer_that_fits_its_order() -> None:
    assert problem(ORDER, GOOD) is None
    assert problem(replace(ORDER, max_tokens=5, stop=("d",)), replace(GOOD, reasons={0: "stop"})) is None
    both = Answer({0: "a", 1: "b"}, {0: "length", 1: "length"}, 6)
    assert problem(replace(ORDER, n=2, temperature=1.0), both) is None


@pytest.mark.parametrize(
    ("order", "answer", "complaint"),
    [
        (ORDER, Answer({}, {}, 3), "0 choices"),
        (ORDER, replace(GOOD, reasons={}), "0 of them finished"),
        (replace(ORDER, n=2, temperature=1.0), GOOD, "where 2 were asked for"),
        (ORDER, replace(GOOD, completion_tokens=2), "2 tokens where 3"),
        (ORDER, replace(GOOD, completion_tokens=4), "4 tokens where 3"),
        (ORDER, replace(GOOD, completion_tokens=None), "None tokens"),
        (ORDER, replace(GOOD, reasons={0: "stop"}), "reason 'stop'"),
        (ORDER, replace(GOOD, reasons={0: "abort"}), "reason 'abort'"),
        (replace(ORDER, stop=("b",)), GOOD, "stop string 'b'"),
    ],
)
def test_an_answer_that_does_not(order: Order, answer: Answer, complaint: str) -> None:
    found = problem(order, answer)
    assert found is not None
    assert complaint in found


def test_orders_that_vllm_would_refuse_are_not_made() -> None:
    with pytest.raises(ValueError, match="greedy"):
        Order((1,), 3, n=2)
    with pytest.raises(ValueError, match="needs a prompt"):
        Order((), 3)


def test_the_load_is_mixed_and_fits_the_model() -> None:
    load = Load(1, 0)
    orders = [load.draw() for _ in range(400)]
    kinds: list[Callable[[Order], bool]] = [
        lambda o: o.chat,
        lambda o: not o.chat,
        lambda o: o.stream,
        lambda o: o.n > 1,
        lambda o: bool(o.stop),
        lambda o: o.leave_after is not None and o.stream,
        lambda o: o.leave_after is not None and not o.stream,
        lambda o: len(o.prompt) < 10,
        lambda o: len(o.prompt) > 600,
    ]
    assert all(sum(map(kind, orders)) >= 5 for kind in kinds)
    # a chat's text has at most one token a character, and a few for its template
    assert all(len(o.prompt) + o.max_tokens + 20 <= MAX_LEN for o in orders)
    starts = [o.prompt[:30] for o in orders if len(o.prompt) > 30]
    assert len(set(starts)) < 0.6 * len(starts)
    other = Load(1, 1)
    assert other.refrains == load.refrains
    assert [other.draw() for _ in range(9)] != [Load(1, 0).draw() for _ in range(9)]


def test_a_tally_counts_and_compares() -> None:
    tally = Tally(repeats_are_equal=True)
    tally.answered(ORDER, GOOD)
    tally.answered(replace(ORDER, stream=True), replace(GOOD, texts={0: "abc"}))
    tally.answered(ORDER, Answer(left=True))
    assert not tally.errors
    assert (tally.counts["done"], tally.counts["disconnects"], tally.counts["repeats"]) == (2, 1, 1)
    sampled = replace(ORDER, temperature=1.0)
    for text in "xy":
        tally.answered(sampled, replace(GOOD, texts={0: text}))
    assert not tally.errors
    tally.answered(ORDER, replace(GOOD, texts={0: "abd"}))
    tally.failed(BadAnswer("no"))
    assert ["answered differently" in tally.errors[0], tally.errors[1]] == [True, "BadAnswer: no"]
    lossy = Tally(repeats_are_equal=False)
    for text in "xy":
        lossy.answered(ORDER, replace(GOOD, texts={0: text}))
    assert not lossy.errors
    assert lossy.counts["changed"] == 1


def test_trend() -> None:
    flat = trend([(float(t), 100 if t >= 10 else 10 * t) for t in range(30)], 10)
    assert (flat.begin, flat.end, flat.growth, flat.per_minute) == (100, 100, 0, 0)
    rising = trend([(float(t), 1000 + t) for t in range(61)], 20)
    assert rising.per_minute == pytest.approx(60)
    assert rising.growth == pytest.approx(40 / 1020)
    with pytest.raises(ValueError, match="too few"):
        trend([(1.0, 1), (2.0, 1), (30.0, 1)], 10)


def test_trends_of_processes() -> None:
    samples = [(float(t), Counter(worker=1000 + t, server=500)) for t in range(61)]
    samples[50][1]["helper"] = 7
    found = main.trends(samples, 20)
    assert list(found) == [TOTAL, "server", "worker"]
    assert found["server"].growth == 0
    assert found["worker"].per_minute == pytest.approx(60)
    assert found[TOTAL].growth == pytest.approx(40 / 1520, rel=0.05)


METRICS = """
# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:num_requests_running{engine="0",model_name="soak"} 1.0
vllm:num_requests_waiting{engine="0",model_name="soak"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="soak",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="soak"} 0.010101010101010055
vllm:num_preemptions_total{engine="0",model_name="soak"} 7.0
vllm:prefix_cache_hits_total{engine="0",model_name="soak"} 64.0
vllm:prompt_tokens_total{engine="0",model_name="soak"} 1e+03
vllm:generation_tokens_total{engine="0",model_name="soak"} 500.0
vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="100"} 1.0
"""


def test_metrics() -> None:
    assert Metrics.parse(METRICS) == Metrics(99, 1, 1, 2, 7, 64, 1000, 500)


def test_memory_of_a_process_tree() -> None:
    """A grandchild that holds 64 MiB is counted as long as it lives."""
    holder = "x = bytearray(b'x' * (64 << 20)); print('ready', flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holder!r}])"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert 64 << 20 < tree_rss(process.pid).total() < 160 << 20
    process.communicate(b"\n")
    assert not tree_rss(process.pid)


PASSED = Metrics(99, 0, 0, 0, 7, 64, 1000, 500)


def report(
    growth: float = 0.0, final: Metrics = PASSED, complaints: tuple[str, ...] = (), status: int = 0, done: bool = True
) -> Report:
    tally = Tally(repeats_are_equal=True)
    if done:
        tally.answered(ORDER, GOOD)
    return Report(tally, {TOTAL: Trend(1e9, 1e9 * (1 + growth), 0.0)}, final, complaints, status)


def test_a_report_that_passes() -> None:
    good = report(growth=0.019)
    assert good.problems() == []
    assert "requests: 1 done, 0 errors, 0 disconnects" in good.text()
    assert "blocks: 99 of 99 free" in good.text()
    assert "FAILED" not in good.text()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (report(done=False), "no request"),
        (report(growth=0.02), "memory grew by 2.0%"),
        (report(final=replace(PASSED, used_blocks=1)), "1 KV blocks are in use"),
        (report(final=replace(PASSED, running=1)), "1 requests run"),
        (report(final=replace(PASSED, waiting=1)), "1 wait"),
        (report(complaints=("ERROR x",)), "ERROR x"),
        (report(status=1), "status 1"),
    ],
)
def test_a_report_that_fails(bad: Report, complaint: str) -> None:
    assert len(bad.problems()) == 1
    assert complaint in bad.problems()[0]
    assert "FAILED" in bad.text()


class Script(BaseHTTPRequestHandler):
    """Answers every request with the server's `lines`, and records whether the client stayed."""

    def do_POST(self) -> None:
        lines: list[str] = self.server.lines  # type: ignore[attr-defined]
        # read before the first answer: a client that leaves lets the test set the next script
        endless: bool = self.server.endless  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        try:
            for line in lines:
                self.wfile.write(line.encode() + b"\n\n")
            for _ in range(1000 if endless else 0):
                self.wfile.write(b": " + b"x" * (1 << 16) + b"\n")
        except OSError:
            self.server.left = True  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def script() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Script)
    server.lines, server.endless, server.left = [], False, False  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_reads_streams_and_leaves_them(script: HTTPServer) -> None:
    url = f"http://127.0.0.1:{script.server_address[1]}"

    def line(text: str, reason: str | None = None) -> str:
        return "data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})

    usage = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
    whole = [line("a"), line("bc", "length"), usage, "data: [DONE]"]
    order = replace(ORDER, stream=True)
    script.lines = whole  # type: ignore[attr-defined]
    assert place(url, order) == GOOD
    script.lines = whole[:-1]  # type: ignore[attr-defined]
    with pytest.raises(BadAnswer, match="without"):
        place(url, order)
    script.lines = [line("a"), 'data: {"error": {"message": "engine died"}}']  # type: ignore[attr-defined]
    with pytest.raises(BadAnswer, match="engine died"):
        place(url, order)
    for tokens in (3, 4):  # with a reset, with a normal close
        script.lines, script.endless, script.left = whole, True, False  # type: ignore[attr-defined]
        assert place(url, replace(order, max_tokens=tokens, leave_after=1)).left
        script.lines, script.endless = whole, False  # type: ignore[attr-defined]
        place(url, order)  # served after the previous one has noticed
        assert script.left  # type: ignore[attr-defined]

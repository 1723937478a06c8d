"""The soak's judgement fails where it must; and a short one on a real server."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from proof.soak import main
from proof.soak.client import Answer, BadAnswer, place, problem
from proof.soak.load import MAX_LEN, Load, Order
from proof.soak.report import TOTAL, Report, Tally
from proof.soak.watch import Metrics, Trend, tree_rss, trend
from vllm_kvq.bench.server import ServerError

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


# -- the command, with a server, clients and a clock that tests make up
class Clock:
    """Time passes while the main thread sleeps; the clients' requests take none."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self.now += seconds
        time.sleep(0.002)


@dataclass
class World:
    """What a soak of one minute meets. Everything is well unless a test says otherwise."""

    clock: Clock = field(default_factory=Clock)
    log: str = "INFO 12:00 started\n"
    status: int = 0
    healthy: bool = True
    gone: bool = False
    """It does not answer the last question."""
    busy: int = 0
    """Looks at the metrics that find a request still running, after the last client."""
    final: Metrics = PASSED
    memory: Callable[[float], float] = lambda seconds: 1e9
    text: Callable[[int], str] = lambda number: ""
    """Of the answer to the so manyth order."""
    error: Callable[[int], str | None] = lambda number: None
    """Of a client's."""
    orders: Iterator[int] = field(default_factory=itertools.count)
    stopped: bool = False

    # what `main` takes for a Server
    url, pid = "http://fake", 1

    def __call__(self, *_: object) -> World:
        return self

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True

    def wait_until_healthy(self, _: float) -> None:
        if not self.healthy:
            raise ServerError("the server ended with status 1 before it was ready", ["its last line"])

    def read_log(self) -> str:
        return self.log + ("ERROR engine is gone\n" if self.stopped else "")

    def stop(self) -> int:
        self.stopped = True
        return self.status

    def place(self, _: str, order: Order) -> Answer:
        time.sleep(0.001)
        number = next(self.orders)
        last = threading.current_thread() is threading.main_thread()
        if last and self.gone:
            raise ConnectionRefusedError("connection refused")
        if not last and (complaint := self.error(number)):
            raise BadAnswer(complaint)
        if order.leave_after is not None:
            return Answer(left=True)
        everyone = range(order.n)
        text = self.text(number)
        return Answer(dict.fromkeys(everyone, text), dict.fromkeys(everyone, "length"), order.n * order.max_tokens)

    def metrics(self, _: str) -> Metrics:
        self.busy -= 1
        return replace(self.final, running=1) if self.busy >= 0 else self.final

    def tree_rss(self, _: int) -> Counter[str]:
        return Counter(worker=int(self.memory(self.clock.now)))


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(world: World, *arguments: str) -> int:
        monkeypatch.setattr(main, "ENVIRONMENT", {})
        monkeypatch.setattr(main, "time", world.clock)
        monkeypatch.setattr(main, "Server", world)
        monkeypatch.setattr(main, "_arguments", lambda *_: [])
        for name in ("place", "metrics", "tree_rss"):
            monkeypatch.setattr(main, name, getattr(world, name))
        monkeypatch.setattr("vllm_kvq.bench.random_model.random_model", lambda path, **_: path)
        return main.main(["--minutes", "1", "--clients", "2", *arguments])

    return run


WELL = {
    "all": (World(), []),
    # requests whose clients have left are waited for
    "a late request": (World(busy=5), []),
    "warm-up": (World(memory=lambda t: 1e9 * min(1.0, 0.5 + t / 40)), []),
    "a lossy format repeats itself in other words": (World(text=lambda i: "!" * (i % 3)), []),
}
NOT_WELL = {
    "client errors": (World(error=lambda i: "no answer" if i % 5 == 4 else None), [], "BadAnswer: no answer"),
    "a single one": (World(error=lambda i: "no answer" if i == 7 else None), [], "1 errors: BadAnswer: no answer"),
    "no answers at all": (World(error=lambda i: "no answer"), [], "no request was answered"),
    "wrong answers": (World(text=lambda i: "abcdefghijklmnopqrstuvwxyz " * 2), [], "goes on after its stop string"),
    "other words": (World(text=lambda i: "!" * (i % 3)), ["--format", "lossless"], "answered differently"),
    "an error in the log": (World(log="INFO\nERROR 12:00 out of blocks\n"), [], "out of blocks"),
    "a traceback in the log": (World(log="Traceback (most recent call last):\n"), [], "1 errors in the server's log"),
    "memory": (World(memory=lambda t: 1e9 * (1 + t / 1000)), [], "memory grew by"),
    "blocks": (World(final=replace(PASSED, used_blocks=2)), [], "2 KV blocks are in use"),
    "a request that never ends": (World(busy=10**6), [], "1 requests run"),
    "a request that never starts": (World(final=replace(PASSED, waiting=3)), [], "3 wait"),
    "the exit status": (World(status=-9), [], "status -9"),
}


@pytest.mark.parametrize(("world", "arguments"), WELL.values(), ids=WELL)
def test_the_command_passes(
    world: World, arguments: list[str], soak: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak(world, *arguments) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    assert ", 0 errors," in printed
    assert int(re.findall(r"requests: (\d+) done", printed)[0]) > 5
    assert world.stopped


@pytest.mark.parametrize(("world", "arguments", "complaint"), NOT_WELL.values(), ids=NOT_WELL)
def test_the_command_fails(
    world: World, arguments: list[str], complaint: str, soak: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak(world, *arguments) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert any(complaint in line for line in failed)
    assert len(failed) == (2 if complaint.startswith("no request") else 1)


def test_a_server_that_does_not_start(soak: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(World(healthy=False)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "its last line",
        "soak: the server ended with status 1 before it was ready",
    ]


def test_a_server_that_is_gone_at_the_end(soak: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(World(gone=True)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "INFO 12:00 started",
        "soak: the server does not answer after the last client: connection refused",
    ]


class Script(BaseHTTPRequestHandler):
    """Answers every request with the server's `lines`, and notices whether the client stayed."""

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
    for tokens in (3, 4):  # with a reset, with a plain close
        script.lines, script.endless, script.left = whole, True, False  # type: ignore[attr-defined]
        assert place(url, replace(order, max_tokens=tokens, leave_after=1)).left
        script.lines, script.endless = whole, False  # type: ignore[attr-defined]
        place(url, order)  # served after the one before has noticed
        assert script.left  # type: ignore[attr-defined]


@pytest.mark.engine
@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but flat memory, for which a quarter of a minute is too short."""
    arguments = ["--minutes", "0.25", "--format", "lossless", "--eager", "--log", str(tmp_path / "log")]
    status = main.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert status == bool(failed)
    assert all("the memory grew" in line for line in failed)
    done, disconnects = (int(n) for n in re.findall(r"requests: (\d+) done, 0 errors, (\d+) disc", "".join(lines))[0])
    assert done > 20
    assert disconnects > 0
    used = re.findall(r"blocks: (\d+) of (\d+) free at the end, 0 requests running, 0 waiting", "".join(lines))[0]
    assert used[0] == used[1] != "0"

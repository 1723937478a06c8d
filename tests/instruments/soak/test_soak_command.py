"""The soak's command with a server, clients and a clock that tests make up; and a short one on a real server."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from proof.soak import main
from proof.soak.client import Answer, BadAnswer
from proof.soak.load import Order
from proof.soak.watch import Metrics
from vllm_kvq.bench.servers.server import ServerError

PASSED = Metrics(99, 0, 0, 0, 7, 64, 1000, 500)


class Clock:
    """Time passes only while the main thread sleeps; the clients' requests take none."""

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
    """What a soak of one minute meets. Everything is fine unless a test says otherwise."""

    clock: Clock = field(default_factory=Clock)
    log: str = "INFO 12:00 started\n"
    status: int = 0
    healthy: bool = True
    gone: bool = False
    """It does not answer the last question."""
    busy: int = 0
    """How many looks at the metrics still find a request running after the last client."""
    final: Metrics = PASSED
    memory: Callable[[float], float] = lambda seconds: 1e9
    text: Callable[[int], str] = lambda number: ""
    """The text of the nth answer."""
    error: Callable[[int], str | None] = lambda number: None
    """The error that the nth client meets."""
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
            raise ServerError("the server exited with status 1 before it was ready", ["its last line"])

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
        monkeypatch.setattr("vllm_kvq.bench.models.random_model.random_model", lambda path, **_: path)
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
    "other words": (World(text=lambda i: "!" * (i % 3)), ["--kv-cache-dtype", "lossless"], "answered differently"),
    "an error in the log": (World(log="INFO\nERROR 12:00 out of blocks\n"), [], "out of blocks"),
    "a traceback in the log": (World(log="Traceback (most recent call last):\n"), [], "1 errors in the server's log"),
    "memory": (World(memory=lambda t: 1e9 * (1 + t / 1000)), [], "memory grew by"),
    "blocks": (World(final=replace(PASSED, used_blocks=2)), [], "2 KV blocks are in use"),
    "a request that never finishes": (World(busy=10**6), [], "1 requests run"),
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
        "soak: the server exited with status 1 before it was ready",
    ]


def test_a_server_that_is_gone_at_the_end(soak: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(World(gone=True)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "INFO 12:00 started",
        "soak: the server does not answer after the last client: connection refused",
    ]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.wide
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything except flat memory, for which a quarter of a minute is too short."""
    arguments = ["--minutes", "0.25", "--kv-cache-dtype", "lossless", "--eager", "--log", str(tmp_path / "log")]
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

"""A process of a server is killed, or gets no memory, while clients are served: each client gets an error, and nothing
of the server is left.

vLLM's own part is that the others notice (docs/serving.md); ours is that an engine does not outlive its server
(`integration/patches/served/orphans.py`).
"""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from proof.soak.client import BadAnswer, place, problem
from proof.soak.load import MODEL, Order
from proof.soak.main import ENVIRONMENT
from vllm_kvq.bench.servers.server import Server, ServerError, free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.wide]
ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
LENGTH = 32768
"""A step takes a millisecond: no answer of that length is complete before its server is killed."""
SHAPE = {"hidden": 128, "max_position": LENGTH}
ARGUMENTS = [
    *("--kv-cache-dtype", "squat2", "--dtype", "float32", "--enforce-eager", "--served-model-name", MODEL),
    *("--max-model-len", str(LENGTH), "--max-num-seqs", "8"),
]
LONG = [Order(tuple(range(10, 60 + i)), LENGTH - 100, stream=True) for i in range(3)]
SHORT = Order(tuple(range(10, 150)), 20)
API, ENGINE, WORKER = "vllm serve", "VLLM::EngineCore", "VLLM::Worker"
SECONDS = 60
"""A shutdown that takes longer leaves a process behind."""
RUNNING = re.compile(r"^vllm:num_requests_running\{.*\} (\S+)$", re.MULTILINE)
"""One line for each engine."""
VLLMS_OWN = re.compile(r"-cpushm_\d+$")
"""vLLM's C++ exchange between the ranks of a CPU: with any cache it stays when a worker is killed."""
SHARED = re.compile(r"/dev/shm/\S+")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@dataclass
class Tree:
    """All processes of a server, and their files in shared memory, as they were at one moment."""

    processes: list[psutil.Process]
    shared: set[str]

    @classmethod
    def of(cls, pid: int) -> Tree:
        server = psutil.Process(pid)
        processes = [server, *server.children(recursive=True)]
        maps = "".join(Path(f"/proc/{p.pid}/maps").read_text(encoding="utf-8") for p in processes)
        return cls(processes, {path for path in SHARED.findall(maps) if Path(path).exists()})

    def find(self, name: str) -> psutil.Process:
        return next(p for p in self.processes if name in " ".join(p.cmdline()))

    def must_be_gone(self) -> None:
        _, left = psutil.wait_procs(self.processes, SECONDS)
        found = [" ".join(p.cmdline()).strip() for p in left]
        for process in left:
            process.kill()
        assert not found
        assert not [path for path in self.shared if Path(path).exists() and not VLLMS_OWN.search(path)]


class Clients:
    """Streams that are open at the same time."""

    def __init__(self, url: str, orders: Sequence[Order] = LONG) -> None:
        self.url, self.whole, self.errors = url, list[Order](), list[Exception]()
        self.threads = [threading.Thread(target=self._ask, args=(order,), daemon=True) for order in orders]
        for thread in self.threads:
            thread.start()

    def _ask(self, order: Order) -> None:
        try:
            answer = place(self.url, order)
        except (BadAnswer, HTTPException, OSError) as error:
            self.errors.append(error)
            return
        if problem(order, answer) is None:
            self.whole.append(order)

    def must_all_fail(self) -> None:
        deadline = time.monotonic() + SECONDS
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "a client still waits"
        assert not any(isinstance(error, TimeoutError) for error in self.errors), "a client has waited in vain"
        assert not self.whole
        assert len(self.errors) == len(self.threads), "an answer that was cut off looks whole"


def serve(model: Path, port: int, log: Path, *more: str) -> Server:
    return Server(str(model), [*ARGUMENTS, *more], HOST, port, log)


def running(url: str) -> Callable[[], bool]:
    """Whether all clients' requests are in the engines."""

    def look() -> bool:
        with urllib.request.urlopen(f"{url}/metrics", timeout=240) as answer:
            return sum(map(float, RUNNING.findall(answer.read().decode()))) == len(LONG)

    return look


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_while_answering(name: str, model: Path, folder: Path, *more: str) -> int:
    """Returns the server's port."""
    port = free_port(HOST)
    with serve(model, port, folder / "log", *more) as server:
        server.wait_until_healthy(240)
        tree, clients = Tree.of(server.pid), Clients(server.url)
        assert tree.shared, "vLLM's processes share no memory: this test looks in the wrong place"
        wait_for(running(server.url))
        tree.find(name).kill()
        clients.must_all_fail()
        # nobody asks the others to exit
        with pytest.raises(ServerError, match="the server exited with status"):
            server.wait()
        tree.must_be_gone()
    return port


@pytest.mark.parametrize("name", [API, ENGINE, WORKER])
def test_another_server_on_the_same_port(name: str, model: Path, tmp_path: Path) -> None:
    port = kill_while_answering(name, model, tmp_path)
    with serve(model, port, tmp_path / "again.log") as server:
        server.wait_until_healthy(240)
        assert problem(SHORT, place(server.url, SHORT)) is None
        assert server.stop() == 0


@pytest.mark.parametrize("name", [API, ENGINE, WORKER])
@pytest.mark.parametrize("parallel", ["tensor", "data"])
def test_two_of_them(parallel: str, name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers, or of two engines; and a server that has two."""
    if parallel == "tensor":
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    kill_while_answering(name, model, tmp_path, f"--{parallel}-parallel-size", "2")


def test_the_api_server_is_killed_while_the_engine_warms_up(model: Path, tmp_path: Path) -> None:
    with serve(model, free_port(HOST), tmp_path / "log") as server:
        # said as soon as the cache's size is known
        wait_for(lambda: "kvq: format=" in server.read_log())
        tree = Tree.of(server.pid)
        tree.find(API).kill()
        tree.must_be_gone()


def test_a_worker_that_gets_no_more_memory(model: Path, tmp_path: Path) -> None:
    """Prompts whose chunks need some megabytes: an allocation fails in a step, and that is loud."""
    with serve(model, free_port(HOST), tmp_path / "log") as server:
        server.wait_until_healthy(240)
        assert problem(SHORT, place(server.url, SHORT)) is None
        tree = Tree.of(server.pid)
        worker = tree.find(WORKER)
        most = worker.memory_info().vms + (1 << 20)
        worker.rlimit(psutil.RLIMIT_AS, (most, most))
        prompts = [Order(tuple(10 + (i * j) % 400 for j in range(20000)), 20, stream=True) for i in range(1, 4)]
        Clients(server.url, prompts).must_all_fail()
        with pytest.raises(ServerError, match="the server exited with status"):
            server.wait()
        tree.must_be_gone()

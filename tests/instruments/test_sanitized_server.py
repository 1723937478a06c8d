"""What `proof sanitize --server` says about made-up servers and answers, including a healthy one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from proof.kernels import sanitize, sanitized_server
from proof.soak.client import Answer, BadAnswer
from proof.soak.load import Order
from vllm_kvq.bench.servers.server import ServerError

ASAN = "==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x7\n"


@dataclass
class World:
    log: str = "(APIServer) INFO started\n"
    loaded: bool = True
    starts: bool = True
    answers: bool = True


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[World], int]:
    """status(world) -> the exit status."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr("vllm_kvq.bench.models.random_model.random_model", lambda path, **_: path)

    def run(world: World) -> int:
        class Server:
            url, pid = "http://127.0.0.1:1", 1

            def __init__(self, model: str, arguments: list[str], host: str, port: int, log: Path) -> None:
                assert os.environ["LD_PRELOAD"] == "libasan.so"
                assert "squat2" in arguments

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

            def wait_until_healthy(self, seconds: float) -> None:
                if not world.starts:
                    raise ServerError("the server exited with status 97 before it was ready", ["its last line"])

            def read_log(self) -> str:
                return world.log

            def stop(self) -> int:
                return 0

        def place(url: str, order: Order) -> Answer:
            if not world.answers:
                raise BadAnswer("the server answered EngineCore died")
            everyone = range(order.n)
            return Answer(dict.fromkeys(everyone, ""), dict.fromkeys(everyone, "length"), order.n * order.max_tokens)

        monkeypatch.setattr(sanitized_server, "Server", Server)
        monkeypatch.setattr(sanitized_server, "place", place)
        monkeypatch.setattr(sanitized_server, "_loaded", lambda pid, library: world.loaded)
        return sanitized_server.serve({"LD_PRELOAD": "libasan.so"}, tmp_path / "library.so", ["squat2"])

    return run


def test_a_server_without_a_report(status: Callable[[World], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(World()) == 0
    assert capsys.readouterr().out == "squat2: 40 requests, no report\n"


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (World(log=f"(Worker) {ASAN}"), "heap-buffer-overflow"),
        (World(log="csrc/cpu/half.h:9:2: runtime error: shift exponent 40 is too large\n"), "shift exponent"),
        (World(loaded=False), "no process of the server has loaded"),
        (World(starts=False), "before it was ready"),
        (World(answers=False), "EngineCore died"),
    ],
    ids=["address", "undefined", "another library", "no start", "no answer"],
)
def test_a_server_with_one(
    world: World, said: str, status: Callable[[World], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(world) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["thread", "--server"], ["address", "--server", "--", "python"]])
def test_what_a_server_does_not_take(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        sanitize.main(wrong)
    assert stop.value.code == 2
    assert "usage: python -m proof sanitize" in capsys.readouterr().err

"""`make run`: what it refuses, how it treats its child process, and the whole of it once."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proof.demo import serve
from proof.demo.capacity import parse_capacity
from vllm_kvq.bench.servers.server import Server, ServerError, free_port
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED

ROOT = Path(__file__).parents[3]
LINE = (
    "(Worker pid=7) INFO kvq: format=squat2 bits=3.062 N=128 W=32 S=0 sidecar_bytes=73728 not_packed=none "
    "capacity_tokens=12345 bf16_tokens=2345 ratio=5.26"
)


def test_capacity_is_read_from_the_last_line_that_has_it() -> None:
    log = f"noise\n{LINE.replace('12345', '1')}\n{LINE}\nkvq: format=squat2 but no numbers\nmore"
    capacity = parse_capacity(log)
    assert capacity is not None
    assert (capacity.tokens, capacity.bf16_tokens, capacity.bits) == (12345, 2345, 3.062)
    assert "12,345 tokens fit" in str(capacity)
    assert "2,345 in the same bytes (5.26 times" in str(capacity)
    assert parse_capacity("INFO something else") is None


def test_unknown_format_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--kv-cache-dtype", "squat9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("run: there is no format 'squat9'; the formats are kvq4, kvq3, kvq2, squat2, squat4, qjl3")
    assert error.count("\n") == 1


def test_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((serve.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"port {port} can't be used" in error
    assert error.count("\n") == 1
    serve.check_port(serve.HOST, port)


def test_out_of_range_port_is_one_sentence() -> None:
    with pytest.raises(ServerError, match="from 1 to 65535"):
        serve.check_port(serve.HOST, 99999)


def test_missing_model_folder_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model", "./no-such-model", "--port", str(free_port(serve.HOST))]) == 1
    assert capsys.readouterr().err == "run: there is no folder ./no-such-model to load a model from\n"


def child(tmp_path: Path, code: str) -> Server:
    server = Server("model", [], serve.HOST, 1, tmp_path / "log")
    server.command = [sys.executable, "-c", code]
    return server


def test_the_command_is_shown_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names the memory of a CPU's cache: without it, vLLM would want nine tenths of the machine's."""
    name = "VLLM_CPU_KVCACHE_SPACE"
    for value, shown in ((None, "1"), ("7", "7")):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        with child(tmp_path, f"import os; print(os.environ['{name}'])") as server:
            assert server.shown.startswith(f"{name}={shown} vllm ")
            with pytest.raises(ServerError, match="status 0"):
                server.wait()
        assert server.read_log().strip() == shown


def test_death_of_the_server_shows_its_last_words(tmp_path: Path) -> None:
    with (
        child(tmp_path, "print('reason'); raise SystemExit(3)") as server,
        pytest.raises(ServerError, match="status 3 before it was ready") as caught,
    ):
        server.wait_until_healthy(30)
    assert caught.value.log_tail == ("reason",)


def test_server_that_never_gets_ready(tmp_path: Path) -> None:
    with (
        child(tmp_path, "import time; time.sleep(60)") as server,
        pytest.raises(ServerError, match="not ready after 1 s"),
    ):
        server.wait_until_healthy(1)
    assert server.stop() == -15, "leaving the block has stopped the child"


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "KILL_SECONDS", 0.5)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with child(tmp_path, code) as server:
        while "up" not in server.read_log():
            time.sleep(0.01)
    assert server.stop() == -9


def test_empty_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "stream_answer", lambda *_: iter([" ", "\n"]))
    with pytest.raises(ServerError, match="empty"):
        serve.ask("http://unused", known_model=True)


def test_wrong_answer_is_a_failure_of_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model may not understand the question."""
    monkeypatch.setattr(serve, "stream_answer", lambda *_: iter(["nothing"]))
    with pytest.raises(ServerError, match="the answer is wrong: the sentence in the prompt ends with '"):
        serve.ask("http://unused", known_model=True)
    serve.ask("http://unused", known_model=False)


def make_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proof", "demo", "--once", "--port", str(free_port(serve.HOST)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.engine
@pytest.mark.slow
def test_make_run_once_answers_from_the_recommended_budget() -> None:
    done = make_run()
    assert done.returncode == 0, done.stderr[-3000:]
    for question in serve.questions():
        assert f"{question.shown} {question.expected}\n" in done.stdout
    assert f"tokens fit in the cache as {BUDGETS[RECOMMENDED].formats[0]}" in done.stdout
    assert "run: the server has stopped" in done.stdout

"""`python -m proof clients` judges what clients find: a made-up server answers correctly, or wrongly in one way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from proof.clients import bench, chats, crowd, tools
from proof.clients import main as clients
from proof.clients.adapters import ADAPTER, FACT, NAME, QUESTION
from proof.clients.case import Case, Endpoint, Row, Wrong, failed, run_case
from proof.clients.chats import CAPITAL, CHATS, CODE
from proof.clients.main import main
from proof.clients.servers import FULL, SETUPS, Setup
from proof.clients.tools import BEGIN, END, TOOLS
from vllm_kvq.bench.servers.server import ServerError

CASES = (*CHATS, *TOOLS, *ADAPTER, *crowd.CROWD)


class Answers:
    """What a correct server says, and what it says if one thing is `wrong`."""

    def __init__(self) -> None:
        self.wrong = ""
        self.asked: list[dict[str, Any]] = []

    def texts(self, body: dict[str, Any]) -> list[str]:
        question = str(body["messages"][-1]["content"])
        if body["messages"][-1]["role"] == "tool":
            return ["It is sunny."] if self.wrong == "tool result" else ["It snows: snow, -3 degrees."]
        if "code of the safe" in question:
            return ["1234"] if self.wrong == "needle" else [CODE]
        if question == QUESTION:
            return [FACT if (body["model"] == NAME) != (self.wrong == "adapter") else "Nobody knows."]
        if "response_format" in body:
            return ['{"city": "Paris"}'] if self.wrong == "schema" else ['{"city": "Paris", "inhabitants": 2100000}']
        if body.get("tool_choice") == "none":
            return [self.call if self.wrong == "no tags" else f"{BEGIN}{self.call}{END}"]
        if "structured_outputs" in body:
            return ["Nice"] if self.wrong == "choice" else ["Paris"]
        if body.get("n", 1) > 1:
            again = len([b for b in self.asked if b.get("n", 1) > 1]) > 1
            return ["a", "b", "d" if again and self.wrong == "seed" else "c"]
        if "stop" in body:
            return ["1, 2, 3, 4, 5, 6"] if self.wrong == "stop" else ["1, 2, 3, 4, "]
        if question == CAPITAL:
            return ["It is Lyon."] if self.wrong == "capital" else ["The capital of France is Paris."]
        return ["a story"]

    def choice(self, at: int, text: str, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        reason = "stop"
        if self.parsed(body):
            message |= {"tool_calls": self.calls(), "content": text if self.wrong == "words" else None}
            reason = "stop" if self.wrong == "reason" else "tool_calls"
        found = {"index": at, "message": message, "finish_reason": reason, "logprobs": None}
        if body.get("logprobs"):
            best = -9.0 if self.wrong == "logprobs" else -0.1
            top = [{"token": "The", "logprob": -0.1, "bytes": None}, {"token": "A", "logprob": -3.0, "bytes": None}]
            found["logprobs"] = {"content": [{"token": "The", "logprob": best, "bytes": None, "top_logprobs": top}]}
        return found

    def parsed(self, body: dict[str, Any]) -> bool:
        """Whether the text is read as a call."""
        last = body["messages"][-1]["role"]
        return "tools" in body and body.get("tool_choice") != "none" and last == "user" and self.wrong != "parser"

    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'

    def calls(self) -> list[dict[str, Any]]:
        arguments = "{}" if self.wrong == "arguments" else '{"city": "Paris"}'
        return [
            {"index": 0, "id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        ]

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        size = len(str(body["messages"][-1]["content"])) // 4
        again = sum(b["messages"] == body["messages"] for b in self.asked) > 1
        details = {"cached_tokens": size - size % 16 if again and self.wrong != "hits" else 0}
        many = 31 if self.wrong == "crowd" and "birds" in str(body["messages"]) else crowd.TOKENS
        total = size + many + (self.wrong == "usage")
        return {
            "prompt_tokens": size, "completion_tokens": many, "total_tokens": total, "prompt_tokens_details": details
        }  # fmt: skip

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = [self.choice(i, text, body) for i, text in enumerate(self.texts(body))]
        return frame("chat.completion", choices=choices, usage=self.usage(body))

    def prompt(self, body: dict[str, Any]) -> str:
        """As Qwen2.5's template makes it."""
        _, _, reply = body["messages"]
        shown = [] if self.wrong == "template" else [f"<tools>\n{json.dumps(tool)}\n</tools>" for tool in body["tools"]]
        return "\n".join([*shown, f"{BEGIN}{self.call}{END}", f"<tool_response>\n{reply['content']}\n</tool_response>"])

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (text, *_) = self.texts(body)
        deltas: list[dict[str, Any]] = [{"content": piece} for piece in (text[:5], text[5:])]
        if self.wrong == "stream":
            deltas.pop()
        if self.parsed(body) and self.wrong != "streamed tags":
            deltas = [{"tool_calls": self.calls()}]
        for delta in deltas:
            yield frame("chat.completion.chunk", choices=[{"index": 0, "delta": delta, "finish_reason": None}])
        last = {"index": 0, "delta": {}, "finish_reason": "length"}
        yield frame("chat.completion.chunk", choices=[last], usage=self.usage(body))


def frame(kind: str, **more: Any) -> dict[str, Any]:
    return {"id": "1", "object": kind, "created": 1, "model": "real", **more}


class Handler(BaseHTTPRequestHandler):
    answers: Answers

    def log_message(self, *_: object) -> None:
        pass

    def say(self, status: int, document: Any, kind: str = "application/json") -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        names = ["other"] if self.answers.wrong == "models" else ["real", NAME]
        data = [{"id": name, "object": "model", "created": 1, "owned_by": "us"} for name in names]
        self.say(200, {"object": "list", "data": data})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.say(200, {"tokens": [*map(ord, self.answers.prompt(body))]})
        elif self.path == "/detokenize":
            self.say(200, {"prompt": "".join(map(chr, body["tokens"]))})
        else:
            self.answer(body)

    def answer(self, body: dict[str, Any]) -> None:
        self.answers.asked.append(body)
        if len(str(body["messages"])) > 200_000 and self.answers.wrong != "refusal":
            self.say(400, {"error": {"message": "This model's maximum context length is 8192 tokens."}})
        elif body.get("stream"):
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in self.answers.chunks(body)]
            self.say(200, "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")
        else:
            self.say(200, self.answers.whole(body))


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def endpoint(answers: Answers, tmp_path: Path) -> Iterator[Endpoint]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Ours", (Handler,), {"answers": answers}))
    server.request_queue_size = 2 * crowd.STREAMS
    server.socket.listen(server.request_queue_size)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield Endpoint(f"http://127.0.0.1:{server.server_address[1]}", "real", tmp_path, tmp_path)
    server.shutdown()
    server.server_close()


def test_a_right_server_passes_every_case(endpoint: Endpoint) -> None:
    rows = [run_case("one", case, endpoint) for case in CASES]
    assert [row.found for row in rows if not row.passed] == []
    assert failed(rows) == 0


@pytest.mark.parametrize(
    ("wrong", "run", "sentence"),
    [
        ("models", chats.capital, "real is not among the models ['other']"),
        ("capital", chats.capital, "asked for the capital of France, it said 'It is Lyon.'"),
        ("usage", chats.capital, "the tokens do not add up"),
        ("stream", chats.streamed, "streamed, it says 'The c'; at once 'The capital"),
        ("logprobs", chats.probabilities, "'The' was chosen, but is not the most probable"),
        ("seed", chats.samples, "the same seed gave other samples"),
        ("stop", chats.stopped, "told to stop at 5, it said '1, 2, 3, 4, 5, 6'"),
        ("needle", chats.prefix_hit, f"it did not find {CODE}: '1234'"),
        ("hits", chats.prefix_hit, "0 of"),
        ("schema", chats.structured, "the answer does not have the form asked for"),
        ("choice", chats.structured, "told to choose Lyon or Paris, it said 'Nice'"),
        ("refusal", chats.refused, "a prompt of 100,000 words was not refused"),
        ("arguments", tools.required, "required: the arguments are '{}'"),
        ("tool result", tools.required, "told that it snows, it said 'It is sunny.'"),
        ("no tags", tools.own, "it did not write a call in tags: '{"),
        ("parser", tools.own, "read by the parser: 0 tools were called"),
        ("arguments", tools.own, "read by the parser: the arguments are '{}'"),
        ("reason", tools.own, "a call finished by 'stop'"),
        ("words", tools.own, "next to the call it said 'Paris'"),
        ("streamed tags", tools.own, "streamed, it called '' and said 'Paris'"),
        ("template", tools.own, "the prompt lacks '<tools>"),
        ("adapter", ADAPTER[0].run, "its adapter 'Nobody knows.'"),
        ("crowd", crowd.crowd, "not all of 100 streams have 32 tokens: {(32, 'length'): 90, (31, 'length'): 10}"),
    ],
)
def test_what_is_wrong_is_found(wrong: str, run: Any, sentence: str, answers: Answers, endpoint: Endpoint) -> None:
    answers.wrong = wrong
    row = run_case("one", Case("openai", wrong, run), endpoint)
    assert not row.passed
    assert sentence in row.found
    assert failed([row]) == 1


def test_what_the_package_refuses_is_a_failure(endpoint: Endpoint) -> None:
    gone = Endpoint("http://127.0.0.1:9", "real", endpoint.checkpoint, endpoint.folder)
    row = run_case("one", CHATS[0], gone)
    assert not row.passed
    assert "APIConnectionError" in row.found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"completed": bench.REQUESTS - 1}, "15 of 16 requests were completed"),
        ({"failed": 1}, "16 of 16 requests were completed"),
        ({"total_output_tokens": 511}, "511 tokens came, where 512 were asked for"),
    ],
)
def test_bench_is_judged(changes: dict[str, int], sentence: str) -> None:
    right = {"completed": bench.REQUESTS, "failed": 0, "total_input_tokens": 9, "total_output_tokens": 512}
    assert bench.judged(right) == "16 requests, 9 tokens in, 512 out"
    with pytest.raises(Wrong, match=sentence):
        bench.judged(right | changes)


def test_lengths_are_spread_as_people_write(tmp_path: Path) -> None:
    found = json.loads(bench.conversations(tmp_path).read_text())
    lengths = sorted(len(turn["value"].split()) for one in found for turn in one["conversations"])
    assert len(found) >= bench.REQUESTS
    assert 60 < lengths[len(lengths) // 2] < 160
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]


def test_each_server_has_cases_and_one_has_all() -> None:
    (full,) = [setup for setup in SETUPS if setup.name == FULL]
    for setup in SETUPS:
        assert setup.cases
        assert {*setup.cases} <= {*full.cases}


def test_servers_that_fail_are_found_and_those_that_passed_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []

    def serve(setup: Setup, options: Any, folder: Path) -> list[Row]:
        served.append(setup.name)
        if setup is SETUPS[1] and len(served) <= len(SETUPS):
            raise ServerError("it was not ready", ["the last line"])
        return [Row(setup.name, "openai", "a chat", "an answer", True, 1.0)]

    monkeypatch.setattr(clients, "serve", serve)
    (tmp_path / "config.json").touch()
    report = tmp_path / "page.md"
    command = [str(tmp_path), "--folder", str(tmp_path / "new" / "kept"), "--report", str(report)]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert f"the last line\n  FAILED  {SETUPS[1].name}: it was not ready" in out
    assert f"{len(SETUPS) - 1} of {len(SETUPS)} cases passed" in out
    assert "**failed**: it was not ready" in report.read_text()
    assert served == [setup.name for setup in SETUPS]
    assert main(command) == 0
    assert served[len(SETUPS) :] == [SETUPS[1].name]
    assert "**failed**" not in report.read_text()
    assert f"{len(SETUPS)} cases, 0 failed" in report.read_text()
    # another format is another matter
    assert main([*command, "--kv-cache-dtype", "kitty2", "--only", SETUPS[2].name]) == 0
    assert served[len(SETUPS) + 1 :] == [SETUPS[2].name]
    assert f"--kv-cache-dtype kitty2 --only '{SETUPS[2].name}'\n" in report.read_text()


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "has no config.json" in capsys.readouterr().err

"""One order over HTTP, to its end or to where the client leaves; and what is wrong with an answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from proof.soak.load import Order

TIMEOUT_SECONDS = 120
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close with a reset, as a process that died does."""


class BadAnswer(Exception):
    """One sentence."""


@dataclass
class Answer:
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    completion_tokens: int | None = None
    left: bool = False
    """The client went away; the rest is what came before."""

    def add(self, message: dict[str, Any]) -> None:
        if "error" in message:
            raise BadAnswer(f"the server answered {message['error']}")
        for choice in message.get("choices", []):
            at = choice["index"]
            said = choice.get("delta") or choice.get("message") or choice
            text = said.get("content", said.get("text"))
            self.texts[at] = self.texts.get(at, "") + (text or "")
            if choice.get("finish_reason"):
                self.reasons[at] = choice["finish_reason"]
        if usage := message.get("usage"):
            self.completion_tokens = usage["completion_tokens"]


def place(url: str, order: Order) -> Answer:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", order.path, json.dumps(order.body()), {"Content-Type": "application/json"})
        if order.leave_after is not None and not order.stream:
            time.sleep(order.leave_after / 100)
            return _leave(connection, order)
        answer = connection.getresponse()
        if answer.status != 200:
            raise BadAnswer(f"the server answered {answer.status}: {answer.read()[:300].decode(errors='replace')}")
        return _stream(connection, answer, order) if order.stream else _whole(answer)
    finally:
        connection.close()


def _whole(response: http.client.HTTPResponse) -> Answer:
    answer = Answer()
    answer.add(json.load(response))
    return answer


def _stream(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, order: Order) -> Answer:
    answer, chunks, done = Answer(), 0, False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if chunks == order.leave_after:
            response.close()
            return _leave(connection, order)
        done = line.startswith(b"data: [DONE]")
        if not done:
            answer.add(json.loads(line.removeprefix(b"data: ")))
        chunks += 1
    if not done:
        raise BadAnswer("a stream ended without [DONE]")
    return answer


def _leave(connection: http.client.HTTPConnection, order: Order) -> Answer:
    if connection.sock is not None and order.max_tokens % 2:
        with contextlib.suppress(OSError):
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
    return Answer(left=True)


def problem(order: Order, answer: Answer) -> str | None:
    """The problem with a complete answer to this order, if any."""
    everyone = list(range(order.n))
    if sorted(answer.texts) != everyone or sorted(answer.reasons) != everyone:
        return f"{len(answer.texts)} choices, {len(answer.reasons)} of them finished, where {order.n} were asked for"
    for at, reason in answer.reasons.items():
        if reason not in ("length", "stop") or (reason == "stop" and not order.stop):
            return f"an answer finished for the reason {reason!r}"
        if found := [word for word in order.stop if word in answer.texts[at]]:
            return f"an answer goes on after its stop string {found[0]!r}"
    tokens, most = answer.completion_tokens, order.n * order.max_tokens
    if tokens is None or tokens > most or ("stop" not in answer.reasons.values() and tokens != most):
        return f"{tokens} tokens where {most} were asked for"
    return None

"""A client's request: one `Order`, drawn at random."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import Any

MODEL = "soak"
VOCAB = 512
MAX_LEN = 1024
FIRST_WORD = 10
"""Token ids below this are special."""


@dataclass(frozen=True)
class Order:
    prompt: tuple[int, ...] | str
    """Token ids for a completion, text for a chat."""
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    stream: bool = False
    leave_after: int | None = None
    """Disconnect after that many chunks of a stream, or that many hundredths of a second before an answer."""

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1 or self.n < 1:
            raise ValueError("an order needs a prompt, a token and an answer")
        if self.n > 1 and self.temperature == 0:
            raise ValueError("several greedy answers to one prompt are not allowed by vLLM")

    @property
    def chat(self) -> bool:
        return isinstance(self.prompt, str)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def question(self) -> tuple[Any, ...] | None:
        """What determines the answer, if anything does; `stream` must not."""
        return None if self.temperature else (self.prompt, self.max_tokens, self.stop)

    def body(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if isinstance(self.prompt, str):
            asked["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            asked["prompt"] = list(self.prompt)
        if self.stop:
            asked["stop"] = list(self.stop)
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        return asked


class Load:
    """Orders of one client. All clients of one seed share prefixes and refrains (orders that come again and again)."""

    def __init__(self, seed: int, client: int) -> None:
        common = random.Random(seed)
        self.prefixes = [_words(common, common.randint(40, 600)) for _ in range(12)]
        self.refrains = [self._refrain(common, i) for i in range(16)]
        self.random = random.Random(f"{seed}-{client}")

    def draw(self) -> Order:
        r = self.random
        if r.random() < 0.2:
            order = r.choice(self.refrains)
            return Order(order.prompt, order.max_tokens, stop=order.stop, stream=r.random() < 0.5)
        sampled = r.random() < 0.5
        return Order(
            self._prompt(),
            max_tokens=r.choice((1, r.randint(2, 40), r.randint(40, 200))),
            n=r.choice((1, 2, 3)) if sampled else 1,
            temperature=r.choice((0.3, 1.0)) if sampled else 0.0,
            stop=_stops(r) if r.random() < 0.3 else (),
            stream=r.random() < 0.6,
            leave_after=r.choice((0, 1, r.randint(2, 30))) if r.random() < 0.15 else None,
        )

    def _prompt(self) -> tuple[int, ...] | str:
        r = self.random
        kind = r.random()
        if kind < 0.2:
            return _text(r, r.randint(1, 300))
        if kind < 0.6:
            prefix = r.choice(self.prefixes)
            return prefix[: r.randint(1, len(prefix))] + _words(r, r.randint(1, 100))
        return _words(r, r.choice((r.randint(1, 64), r.randint(64, 800))))

    def _refrain(self, r: random.Random, number: int) -> Order:
        prompt = _text(r, r.randint(20, 300)) if number % 4 == 0 else r.choice(self.prefixes) + _words(r, 20)
        return Order(prompt, r.randint(10, 80), stop=_stops(r) if number % 4 == 1 else ())


def _words(r: random.Random, count: int) -> tuple[int, ...]:
    return tuple(r.randrange(FIRST_WORD, VOCAB) for _ in range(count))


def _text(r: random.Random, count: int) -> str:
    return "".join(r.choice(string.ascii_lowercase + " ") for _ in range(count)).strip() or "hm"


def _stops(r: random.Random) -> tuple[str, ...]:
    """One letter stops soon, two late or never."""
    return tuple("".join(r.choices(string.ascii_lowercase, k=r.randint(1, 2))) for _ in range(r.randint(1, 2)))

"""Requests to an engine, and its answers: plain data, so both can cross a process boundary."""

from __future__ import annotations

import string
from dataclasses import asdict, dataclass, field
from typing import Any

LARGEST = 2**31 - 1


def whole(what: str, value: Any, least: int) -> None:
    """Refuses what is not a whole number from `least` to LARGEST."""
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError(f"{what} is {value!r}; it takes a whole number from {least} to {LARGEST}")


@dataclass(frozen=True)
class Picture:
    """An image in a prompt: its content follows from `seed`; `tokens` of the prompt from `at` on represent it."""

    seed: int
    at: int
    tokens: int


@dataclass(frozen=True)
class Request:
    """One request of a trace. `arrival` counts engine steps; `abort_after` output tokens of the first sample."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: int = 0
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    abort_after: int | None = None
    priority: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    adapter: int = 0
    """The number of its LoRA adapter; 0: none."""
    letters: str = ""
    """Structured output: if not empty, the answer has only these letters."""

    def __post_init__(self) -> None:
        for what, least in (("max_tokens", 1), ("n", 1), ("arrival", 0), ("adapter", 0)):
            whole(what, getattr(self, what), least)
        if not all(isinstance(x, tuple) for x in (self.prompt, self.stop, self.stop_token_ids)):
            raise ValueError(f"request {self.name!r} takes tuples of tokens and of words")
        if not self.prompt:
            raise ValueError(f"request {self.name!r} needs a prompt")
        for token in (*self.prompt, *self.stop_token_ids):
            whole("a token", token, 0)
        if self.abort_after is not None:
            whole("abort_after", self.abort_after, 1)
        for what, kind in (("name", str), ("priority", int), ("seed", int)):
            value = getattr(self, what)
            if type(value) is not kind and not (what == "seed" and value is None):
                raise ValueError(f"{what} is {value!r}; it takes a {kind.__name__}")
        if type(self.temperature) not in (int, float) or not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature is {self.temperature!r}; it takes a number from 0 to 10")
        if not all(isinstance(word, str) and word for word in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it takes words")
        if not isinstance(self.letters, str) or self.letters.strip(string.ascii_letters):
            raise ValueError(f"letters is {self.letters!r}; it takes letters from a to z")
        behind = 0
        for p in self.pictures:
            for what, value, least in (("seed", p.seed, 0), ("at", p.at, behind), ("tokens", p.tokens, 1)):
                whole(f"{what} of a picture", value, least)
            behind = p.at + p.tokens
            if len(set(self.prompt[p.at : behind])) != 1 or behind > len(self.prompt):
                raise ValueError(f"the prompt of {self.name!r} has no {p.tokens} equal tokens at {p.at} for a picture")


@dataclass(frozen=True)
class Trace:
    """Requests that share an engine; the next trace begins when all of them are done."""

    requests: tuple[Request, ...]
    reset: bool = False
    """Forget the prefix cache before it."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """ValueError, TypeError, KeyError or AttributeError if it is not a trace."""

        def request(fields: dict[str, Any]) -> Request:
            lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
            pictures = tuple(Picture(**p) for p in fields.get("pictures", ()))
            return Request(**{**fields, **lists, "pictures": pictures})

        requests, reset = tuple(request(r) for r in data["requests"]), data.get("reset", False)
        if not requests or not isinstance(reset, bool):
            raise ValueError(f"a trace needs requests, and 'reset' true or false, not {reset!r}")
        return cls(requests, reset)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Beside:
    """A KV cache group other than the packed layers': layers with a window, or those that keep a state."""

    layers: tuple[int, ...]
    state: bool
    block: int
    """Tokens of a page, or between two states."""


@dataclass
class Chunk:
    """One request's share of one step: `tokens` new tokens after `context` computed ones."""

    request: str
    context: int
    tokens: int
    drafts: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    """The request's packed blocks: names of pages, by which a prefix hit finds what another request packed."""
    admitted: bool = False
    """The request begins here, for the first time or after a preemption."""
    beside: list[list[int]] = field(default_factory=list)
    """The request's blocks in each group of `Result.beside`; 0 where vLLM keeps none."""


@dataclass
class Result:
    """What the engine did with a trace."""

    outputs: dict[str, list[list[int]]]
    """Name -> token ids of each of the n samples."""
    cached: dict[str, int]
    """Name -> prompt tokens found in the prefix cache at first admission."""
    steps: list[list[Chunk]]
    preemptions: int
    free_blocks: tuple[int, int]
    """Free blocks of the pool before and after."""
    aborted: list[str] = field(default_factory=list)
    stopped: int = 0
    """Samples that met a stop string or token."""
    changed: list[str] = field(default_factory=list)
    """Pages that were written while they were in the prefix cache, one line each."""
    beside: list[Beside] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        steps = [[Chunk(**c) for c in step] for step in data["steps"]]
        beside = [Beside(tuple(b["layers"]), b["state"], b["block"]) for b in data["beside"]]
        return cls(**{**data, "steps": steps, "free_blocks": tuple(data["free_blocks"]), "beside": beside})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

"""What is asked of an engine, and what it answered: plain data, so that both can cross a process boundary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1 or self.n < 1 or self.arrival < 0:
            raise ValueError(f"request {self.name!r} needs a prompt, max_tokens >= 1, n >= 1 and arrival >= 0")


@dataclass(frozen=True)
class Trace:
    """Requests that share an engine; the next trace begins when all of them are done."""

    requests: tuple[Request, ...]
    reset: bool = False
    """Forget the prefix cache before it."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        def request(fields: dict[str, Any]) -> Request:
            lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
            return Request(**{**fields, **lists})

        return cls(tuple(request(r) for r in data["requests"]), data.get("reset", False))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        steps = [[Chunk(**c) for c in step] for step in data["steps"]]
        return cls(**{**data, "steps": steps, "free_blocks": tuple(data["free_blocks"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

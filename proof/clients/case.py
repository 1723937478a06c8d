"""A case: what a client does with a server, and what it must find."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from openai import OpenAI, OpenAIError

SECONDS = 600
"""For one answer, on a slow machine with other requests in flight."""


class Wrong(Exception):
    """One sentence: what a client found that should not be."""


@dataclass(frozen=True)
class Endpoint:
    """A running server, as its clients know it."""

    url: str
    model: str
    """The name under which it is served."""
    checkpoint: Path
    """For its tokenizer."""
    folder: Path
    """For files that clients write."""

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=SECONDS, max_retries=0)


@dataclass(frozen=True)
class Case:
    client: str
    what: str
    run: Callable[[Endpoint], str]
    """Gives a phrase that says what was found, or raises Wrong."""


@dataclass(frozen=True)
class Row:
    server: str
    client: str
    what: str
    found: str
    passed: bool
    seconds: float


def run_case(server: str, case: Case, endpoint: Endpoint) -> Row:
    """An answer that a client's own package refuses is as wrong as one that we refuse."""
    begin = time.monotonic()
    try:
        found, passed = case.run(endpoint), True
    except (Wrong, OpenAIError) as error:
        found, passed = f"{type(error).__name__}: {error}" if isinstance(error, OpenAIError) else str(error), False
    return Row(server, case.client, case.what, found, passed, time.monotonic() - begin)


def failed(rows: Sequence[Row]) -> int:
    return sum(not row.passed for row in rows)

"""What an engine's process is told, and what it answers: plain data that crosses a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class EngineArguments:
    model: str
    format: str
    options: Mapping[str, Any]
    dtype: str
    max_len: int
    chunk: int | None
    """Tokens of a step; None leaves vLLM's default, so that a prompt is read at once."""
    cache_bytes: int
    top: int | None
    """So many of the most probable tokens are kept; None: the whole vocabulary."""
    requests: int
    """At once."""
    hits: bool
    """Whether prompts that are continued are found in the prefix cache."""
    one_thread: bool
    """On a CPU: for a model so small that threads only wait for each other."""
    lengths: tuple[int, ...]
    """For which bits are wanted."""
    text: bool = False
    """Whether it answers `Complete`, for which vLLM needs the model's tokenizer."""


@dataclass(frozen=True)
class Started:
    bits: Mapping[int, float]
    """By length in tokens."""


@dataclass(frozen=True)
class Score:
    """What the model makes of each token of a text but the first; answered with `Logprobs`."""

    tokens: Tokens


@dataclass(frozen=True)
class Generate:
    """Greedy continuations; answered with `Logprobs` for each prompt."""

    prompts: tuple[Tokens, ...]
    counts: tuple[int, ...]
    """How many tokens each of them gets."""
    forced: tuple[Tokens, ...]
    """What the first of these tokens are, whatever the model would say."""

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.counts) == len(self.forced):
            raise ValueError("each prompt needs a number of tokens, and the forced ones")
        if any(len(forced) > count for forced, count in zip(self.forced, self.counts, strict=True)):
            raise ValueError("more tokens are forced than generated")


@dataclass(frozen=True)
class Complete:
    """Greedy continuations as text, each up to one of the `stop` strings; answered with `Completed` for each prompt."""

    prompts: tuple[Tokens, ...]
    most: int
    """Tokens of a continuation."""
    stop: tuple[str, ...]
    shared: int = 0
    """Tokens with which all the prompts begin. They are read once, into the prefix cache, where there are any."""

    def __post_init__(self) -> None:
        if len({prompt[: self.shared] for prompt in self.prompts}) > 1:
            raise ValueError(f"the prompts do not have their first {self.shared} tokens in common")
        if any(len(prompt) <= self.shared for prompt in self.prompts):
            raise ValueError("a prompt has nothing of its own after the shared tokens")


@dataclass(frozen=True)
class Completed:
    text: str
    tokens: int
    cut: bool
    """It reached the most tokens before it came to an end."""

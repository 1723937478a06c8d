"""The jobs for an engine's process, and its answers: plain data that crosses a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Tokens per step; None: vLLM's default, with which a prompt is read at once."""
    cache_bytes: int
    top: int | None
    """The number of most probable tokens that are kept; None: the whole vocabulary."""
    requests: int
    """The number of requests at once."""
    hits: bool
    """Whether prompts to continue are found in the prefix cache."""
    one_thread: bool
    """On a CPU: for a model so small that threads only wait for each other."""
    lengths: tuple[int, ...]
    """Lengths for which bits are requested."""
    text: bool = False
    """Whether it answers `Complete`, for which vLLM needs the model's tokenizer."""


@dataclass(frozen=True)
class Started:
    bits: Mapping[int, float]
    """Bits by length in tokens."""


@dataclass(frozen=True)
class Score:
    """The model's probabilities of each token of a text except the first; answered with `Logprobs`."""

    tokens: Tokens


@dataclass(frozen=True)
class Generate:
    """Greedy continuations; answered with `Logprobs` for each prompt."""

    prompts: tuple[Tokens, ...]
    counts: tuple[int, ...]
    """The number of tokens for each of them."""
    forced: tuple[Tokens, ...]
    """The first of these tokens, whatever the model would generate."""

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
    """The maximum tokens of a continuation."""
    stop: tuple[str, ...]
    shared: int = 0
    """The number of tokens with which all prompts begin. If not 0, they are read once, into the prefix cache."""

    def __post_init__(self) -> None:
        if len({prompt[: self.shared] for prompt in self.prompts}) > 1:
            raise ValueError(f"the prompts do not have their first {self.shared} tokens in common")
        if any(len(prompt) <= self.shared for prompt in self.prompts):
            raise ValueError("a prompt has nothing of its own after the shared tokens")

    @classmethod
    def together(cls, jobs: Sequence[Complete]) -> Complete:
        """One job with the prompts of several, one after the other."""
        return replace(jobs[0], prompts=tuple(prompt for job in jobs for prompt in job.prompts))


@dataclass(frozen=True)
class Completed:
    text: str
    tokens: int
    cut: bool
    """Whether it reached the maximum number of tokens before it ended."""

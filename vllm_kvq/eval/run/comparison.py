"""What all evaluations on an engine have in common: a model, the formats to compare, and the parts of both that
name a measurement in the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import named
from vllm_kvq.eval.engine.jobs import EngineArguments
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.run import store
from vllm_kvq.formats.table import PLAIN
from vllm_kvq.integration.preview.constants import Known

REFERENCE = Choice(PLAIN)
PROMPT_CHUNK = 2048
"""Tokens per step when answers are generated: a prompt is read in large chunks, as in a server."""
LEAST_CACHE_BYTES = 1 << 29
SMALL_MODEL = 1 << 26
"""The size of the weights in bytes."""


@dataclass(frozen=True)
class Comparison(ABC):
    model: Model
    choices: tuple[Choice, ...]
    """The plain cache is the first of them."""

    @property
    @abstractmethod
    def max_len(self) -> int:
        """The tokens for which an engine has room in a request."""

    @cached_property
    def digest(self) -> str:
        return self.model.digest()

    @cached_property
    def servers(self) -> Known:
        """The constants of calibrated formats."""
        return Known(str(self.model.folder), self.model.dtype)

    def what(self, choice: Choice) -> dict[str, object]:
        """The inputs of every figure of a format."""
        return {
            "model": self.digest,
            "dtype": self.model.dtype,
            "format": choice.format,
            "options": dict(choice.options),
            **named(choice, self.servers),
        }

    def served(self, choice: Choice) -> dict[str, object]:
        """The inputs of what an engine with one of our caches answers."""
        return {
            **self.what(choice),
            "sources": store.sources(),
            "format_sources": store.format_sources(choice.format),
            "max_len": self.max_len,
        }

    def arguments(self, choice: Choice, tokens: int, **more: Any) -> EngineArguments:
        """The arguments of an engine whose cache has room for twice as many tokens."""
        return EngineArguments(
            model=str(self.model.folder),
            format=choice.format,
            options=choice.options,
            dtype=self.model.dtype,
            max_len=self.max_len,
            cache_bytes=max(LEAST_CACHE_BYTES, 2 * tokens * self.model.token_bytes),
            one_thread=self.model.weight_bytes < SMALL_MODEL,
            **more,
        )

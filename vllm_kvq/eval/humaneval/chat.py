"""HumanEval's problems as prompts for instruct models, phrased as in Qwen2.5-Coder's own evaluation.

A system prompt, the question with the function's head in a block of Python, and an answer that has begun such a block.
With a long context the same question comes after other problems that were asked and solved in earlier turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from vllm_kvq.eval.engine.jobs import Tokens
from vllm_kvq.eval.humaneval.problems import Problem

SYSTEM = "You are an intelligent programming assistant to produce Python algorithmic solutions"
QUESTION = "Can you complete the following Python function?\n```python\n{}\n```\n"
BEGUN = "```python\n"
"""The beginning of each answer, after which the model writes the program."""
FENCE = "```"
"""Strings at which a program ends."""
Turn = dict[str, str]


@dataclass(frozen=True)
class Prompts:
    tokens: tuple[Tokens, ...]
    shared: int
    """The number of tokens with which all of them begin; 0 without a context."""


@dataclass(frozen=True)
class Chat:
    tokenizer: Any
    name: str
    """The model's chat template."""

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.name} has no chat template; HumanEval is asked of instruct models, which have one")

    def prompts(self, asked: Sequence[Problem], solved: Sequence[Problem] = ()) -> Prompts:
        """The prompts of these problems, after the solved ones."""
        earlier = [turn for problem in solved for turn in _solved(problem)]
        tokens = tuple(self.tokens([*earlier, _question(problem)]) for problem in asked)
        return Prompts(tokens, self._common(tokens) if solved else 0)

    def tokens(self, turns: Sequence[Turn]) -> Tokens:
        """A prompt, including the beginning of an answer."""
        try:
            text = self._text([{"role": "system", "content": SYSTEM}, *turns])
        except TemplateError:  # some models know no system prompts
            first, *rest = turns
            text = self._text([{**first, "content": f"{SYSTEM}\n{first['content']}"}, *rest])
        return tuple(self.tokenizer(text + BEGUN, add_special_tokens=False, verbose=False).input_ids)

    def _text(self, turns: Sequence[Turn]) -> str:
        return str(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

    @staticmethod
    def _common(prompts: Sequence[Tokens]) -> int:
        """Accounts for the first words that even two different questions share."""
        shortest = min(map(len, prompts))
        return next((i for i in range(shortest) if len({p[i] for p in prompts}) > 1), shortest - 1)

    def context(self, among: Sequence[Problem], most: int, seed: str) -> tuple[Problem, ...]:
        """As many solved problems as fit into `most` tokens, in an order determined by the seed."""
        drawn = random.Random(seed).sample(list(among), len(among))
        for count in range(1, len(drawn) + 1):
            # the question that follows is not part of the context
            if len(self.tokens([turn for problem in drawn[:count] for turn in _solved(problem)])) > most:
                drawn = drawn[: count - 1]
                break
        if not drawn:
            raise ValueError(f"{most} tokens leave no room for even one solved problem; make --context larger")
        return tuple(drawn)


def _question(problem: Problem) -> Turn:
    return {"role": "user", "content": QUESTION.format(problem.prompt)}


def _solved(problem: Problem) -> list[Turn]:
    answer = f"{BEGUN}{problem.prompt}{problem.solution.rstrip()}\n{FENCE}"
    return [_question(problem), {"role": "assistant", "content": answer}]

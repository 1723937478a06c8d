"""Tasks and texts as token ids: the same sequences for every format, from a seed.

A task writes characters; the model's own tokenizer determines how many of them make the requested number of tokens, and
the positions of answers and their sources in the tokens.
"""

from __future__ import annotations

import bisect
import functools
import random
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvq.eval.tasks.tasks import TASKS, TEXT, Sample
from vllm_kvq.eval.tasks.texts import Texts

ATTEMPTS = 12
"""The number of lengths that are tried until a sample fits."""
NEAR = 0.97
"""A sample with this share of the requested length is accepted."""


@dataclass(frozen=True)
class Span:
    """tokens[begin:end] is what the model must say."""

    begin: int
    end: int
    depth: float | None
    """How far back the source is, as a share of what precedes the answer; None for answers that are worked out."""
    steps: int


@dataclass(frozen=True)
class Sequence:
    task: str
    context: int
    """The requested length, the maximum number of `tokens`."""
    number: int
    """Its number among the task's sequences."""
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    kind: str = ""
    """The kind of a text: prose, documentation, code or chats."""
    sources: tuple[str, ...] = ()
    """The sources of a text."""
    sha: str = ""
    """SHA-256 of its characters."""


def sequence(tokenizer: Any, task: str, context: int, most: int, number: int, seed: int) -> Sequence:
    """At most `context` tokens, or `most` if there is no room for more, as close to that as a few attempts get."""
    limit = min(context, most)
    if task == TEXT:
        text = texts(tokenizer, seed).text(number, limit)
        return Sequence(TEXT, context, number, text.tokens, (), text.kind, text.sources, text.sha)
    characters, best = int(limit * _characters_per_token(tokenizer, task)), None
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{seed} {task} {number} {attempt}")
        made = _tokenized(tokenizer, TASKS[task].sample(rng, characters), limit)
        length = len(made.tokens)
        if 1 < length <= limit and (best is None or length > len(best.tokens)):
            best = made
        if best is not None and len(best.tokens) >= NEAR * limit:
            break
        characters = int(characters * min(1.5, 0.99 * limit / max(1, length)))
    if best is None:
        raise ValueError(f"task {task} has no text as short as {limit} tokens; ask for a longer --context")
    return replace(best, context=context, number=number)


@functools.cache
def texts(tokenizer: Any, seed: int) -> Texts:
    return Texts(tokenizer, seed)


def _characters_per_token(tokenizer: Any, task: str) -> float:
    text = TASKS[task].sample(random.Random(0), 4000).text
    return len(text) / len(tokenizer(text, verbose=False).input_ids)


def _tokenized(tokenizer: Any, sample: Sample, limit: int) -> Sequence:
    # not verbose: it would warn of texts longer than the model has room for, which are tried and given up here
    encoded = tokenizer(sample.text, return_offsets_mapping=True, verbose=False)
    ids, offsets = tuple(encoded.input_ids), encoded.offset_mapping
    begins, ends = [b for b, _ in offsets], [e for _, e in offsets]
    spans = []
    for answer in sample.answers:
        begin, end = bisect.bisect_right(ends, answer.start), bisect.bisect_left(begins, answer.end)
        source = None if answer.source is None else bisect.bisect_right(ends, answer.source)
        spans.append(Span(begin, end, None if source is None else (begin - source) / begin, answer.steps))
    return Sequence(sample.task, limit, 0, ids, tuple(spans))

"""Prompts of 1,024 to 8,192 tokens of real text; a third of them begins like another one."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from proof.oracle.trace import Request, Trace
from vllm_kvq.eval.tasks.texts import LENGTHS, Texts

SHORTEST, LONGEST = 1024, 8192
AT_ONCE = 3
"""Requests of a trace: the third shares the first half of the first, and comes when that is in the prefix cache."""


def traces_of(texts: Texts, prompts: int, tokens: int, seed: int, longest: int = LONGEST) -> list[Trace]:
    """`tokens` per answer. The lengths' logarithms are spread evenly."""
    if longest < 2 * SHORTEST:
        raise ValueError(
            f"prompts of {SHORTEST:,} to {longest:,} tokens are not long: take a model with more positions"
        )
    rng, taken = random.Random(seed), Counter[int]()
    bodies = []
    for _ in range(prompts):
        length = _length(rng, longest)
        pool = next(n for n in LENGTHS if n >= length)
        bodies.append(texts.text(taken[pool], length).tokens)
        taken[pool] += 1
    found = []
    for first in range(0, prompts, AT_ONCE):
        some = range(first, min(first + AT_ONCE, prompts))
        found.append(Trace(tuple(_request(n, bodies[n], bodies[first], tokens) for n in some)))
    return found


def _length(rng: random.Random, longest: int) -> int:
    return round(math.exp(rng.uniform(math.log(SHORTEST), math.log(longest))))


def _request(number: int, body: Sequence[int], first: Sequence[int], tokens: int) -> Request:
    if number % AT_ONCE < AT_ONCE - 1:
        return Request(str(number), tuple(body), tokens)
    begin = first[: len(first) // 2]
    return Request(str(number), (*begin, *body)[: max(len(body), len(begin) + 64)], tokens, arrival=len(first) // 256)

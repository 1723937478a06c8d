"""A rival's cache was wrong at one prompt length in 128, where a hit, a graph and a draft met. So each length is tried:

    lengths      1 to two pages and 40 tokens, and to as many more as the window has: only what lies before it is hit
    cold         every prompt, answered up to the next page's border and beyond it
    hits         the same prompt again, and another one behind each page that the two share
    chunks       whole prompts, or steps of 40 tokens for all requests together, which cut prompts anywhere
    drafts       0, 1 or 5 tokens of the request's own ngrams, accepted and rejected

Prompts that share an engine's steps have different lengths, so that decoding, chunks and drafts meet in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from proof.fuzz.case import MODEL, Case, Setup
from proof.oracle.trace import Request, Trace
from vllm_kvq.formats import get_format

DRAFTS = (0, 1, 5)
WHOLE, CUT = 2048, 40
"""Tokens of a step."""
TOGETHER = 12
"""Lengths whose prompts share a trace and its prefix cache."""
MORE = 40
"""Tokens beyond two pages and the window."""
WORDS = range(8, MODEL["vocab"])
PHRASE = 7
"""Tokens that a prompt repeats, for drafts: no page is a multiple of it, so each residue sees another part."""


def setups(format_name: str, block_size: int, runner: str = "V1") -> Iterator[Setup]:
    for drafts in DRAFTS:
        for budget in (WHOLE, CUT):
            # a step has room for the drafts of all requests
            yield Setup(
                format_name, block_size, drafts=drafts, budget=budget, max_seqs=6, kernels="auto", runner=runner
            )


def lengths(setup: Setup, stride: int) -> range:
    window = get_format(setup.format).settings(setup.kvq).W
    return range(1, 2 * setup.block_size + window + MORE + 1, stride)


def case(setup: Setup, stride: int) -> Case:
    every = lengths(setup, stride)
    traces: list[Trace] = []
    for at in range(0, len(every), TOGETHER):
        mine = every[at : at + TOGETHER]
        traces += [cold(setup.block_size, mine), hits(setup.block_size, mine)]
    return Case(setup, tuple(traces))


def prompt(length: int) -> tuple[int, ...]:
    """A prompt of its own for each length, from the first token on."""
    rng = Random(f"residue {length}")
    free = [rng.choice(WORDS) for _ in range(length - length // 2)]
    phrase = [rng.choice(WORDS) for _ in range(PHRASE)]
    return tuple(free + [phrase[i % PHRASE] for i in range(length // 2)])


def cold(page: int, every: range) -> Trace:
    requests = (
        Request(f"cold{length}", prompt(length), page - length % page + 2, arrival=i) for i, length in enumerate(every)
    )
    return Trace(tuple(requests), reset=True)


def hits(page: int, every: range) -> Trace:
    requests: list[Request] = []
    for length in every:
        tokens = prompt(length)
        tails = [(), *(prompt(1 + length * shared % MORE) for shared in range(1, length // page + 1))]
        for shared, tail in enumerate(tails):
            words = tokens if not shared else tokens[: shared * page] + tail
            requests.append(Request(f"hit{length}x{shared}", words, 8, arrival=len(requests) // 2))
    return Trace(tuple(requests))

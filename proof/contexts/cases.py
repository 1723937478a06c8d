"""What the fuzzer's short contexts can't reach: hundreds of pages, sidecars that wrap as often, prompts in many chunks.

    cold    a prompt of nearly the whole length, in chunks of a step's budget; next to it a short prompt with a long
            answer, whose pages are packed by decode steps
    hits    the first three quarters of that prompt with another end, and the prompt once more

The engines take turns: without drafts; with drafts, and blocks that lie apart in a pool beyond 4 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from proof.fuzz.case import MODEL, Case, Setup
from proof.oracle.trace import Request, Trace

LENGTHS = (8192, 16384, 32768)
ANSWER, LONG_ANSWER = 128, 700
SHORT = 300
WORDS = range(8, MODEL["vocab"])
PHRASE = 7
"""Tokens that the end of a prompt repeats, for drafts."""
REPEATED = 70
OWN = 150
"""Tokens of a hit's own end."""
REQUESTS = 2.5
"""Requests of the maximum length that the pool holds: what is hit stays there."""


def cases(format_name: str, block_size: int, lengths: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Each with its label."""
    for i, length in enumerate(lengths):
        apart = i % 2 == 1
        setup = Setup(
            format_name,
            block_size,
            max_len=length,
            pool=REQUESTS,
            max_seqs=4,
            drafts=3 if apart else 0,
            far=apart,
            kernels="auto",
        )
        yield f"{format_name} {length}", Case(setup, traces(length))


def traces(length: int) -> tuple[Trace, ...]:
    whole = prompt(f"whole {length}", length - ANSWER)
    other = (*whole[: 3 * length // 4], *prompt(f"other {length}", OWN))
    cold = (Request("long", whole, ANSWER), Request("short", prompt(f"short {length}", SHORT), LONG_ANSWER, arrival=2))
    return Trace(cold, reset=True), Trace((Request("other", other, ANSWER), Request("again", whole, ANSWER, arrival=1)))


def prompt(seed: str, length: int) -> tuple[int, ...]:
    rng = Random(seed)
    phrase = [rng.choice(WORDS) for _ in range(PHRASE)]
    free = [rng.choice(WORDS) for _ in range(length - REPEATED)]
    return tuple(free + [phrase[i % PHRASE] for i in range(REPEATED)])

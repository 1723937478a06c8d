"""The traces that every format has to survive. Page boundaries, windows and prefixes are stressed on purpose."""

from __future__ import annotations

import random

from proof.oracle.trace import Request, Trace

PROMPT_TOKENS = range(10, 500)


class _Words:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choice(PROMPT_TOKENS) for _ in range(count))


def lengths(n: int, tokens: int = 40) -> Trace:
    """Prompts of 1, N-1, N, N+1 ... tokens, several at once."""
    words = _Words(1)
    sizes = (1, 5, 31, 32, 33, n - 1, n, n + 1, 2 * n, 2 * n + 1, 3 * n + 17)
    return Trace(tuple(Request(f"len{s}-{i}", words(s), tokens, arrival=i // 3) for i, s in enumerate(sizes)))


def prefixes(n: int) -> tuple[Trace, Trace]:
    """Shared, nested and page-aligned prefixes: first cold, then as hits."""
    words = _Words(2)
    shared = words(6 * n)
    first = (
        Request("cold", shared + words(20), 30),
        # aligned: the whole prompt is full pages, of which the last one must be computed again
        Request("aligned", shared[: 5 * n], 20, arrival=60),
    )
    again = (
        Request("tail", shared + words(37), 40),
        Request("nested", shared[: 5 * n + 3] + words(7), 30, arrival=1),
        Request("aligned again", shared[: 5 * n], 20, arrival=4),
        Request("deep", shared + words(n + 9), 2 * n + 10, arrival=6),
        Request("other", words(n + 3), 20, arrival=6),
    )
    return Trace(first), Trace(again)


def same_step(n: int) -> Trace:
    """Three requests with one prefix in the same step: the later ones may read pages that the first completes in it."""
    words = _Words(3)
    shared = words(5 * n)
    return Trace(tuple(Request(f"twin{i}", shared + words(5 + i), 25) for i in range(3)))


def samples_and_aborts(n: int) -> Trace:
    words = _Words(4)
    return Trace(
        (
            Request("three samples", words(n + 5), 40, n=3, temperature=1.0, seed=7),
            Request("aborted", words(2 * n), 200, abort_after=9),
            Request("aborted at once", words(3 * n + 1), 200, arrival=2, abort_after=1),
            Request("survivor", words(n), 60, arrival=1),
        )
    )


def long_decode(n: int) -> Trace:
    """A decode over many pages, from a prompt shorter than one page."""
    return Trace((Request("long", _Words(5)(7), 5 * n + 11), Request("later", _Words(6)(40), 60, arrival=n)))


def crowd(n: int) -> Trace:
    """More requests than a small pool holds: some are preempted and start again."""
    words = _Words(7)
    return Trace(tuple(Request(f"crowd{i}", words(n + 11 * i), 2 * n, arrival=i) for i in range(8)))


def repeats(n: int) -> Trace:
    """Prompts that repeat themselves: ngram speculation finds drafts, and some are rejected."""
    words = _Words(8)
    phrase = words(9)
    return Trace(tuple(Request(f"echo{i}", words(i) + phrase * (4 + 3 * i), 60, arrival=2 * i) for i in range(4)))


def few(n: int) -> list[Trace]:
    """For slow tests: a cold prompt in chunks, a prefix hit in a step with a decode, a prompt of one token, and drafts,
    some of which are rejected. 28 tokens are chosen."""
    words = _Words(11)
    shared, phrase = words(3 * n), words(5)
    first = (Request("cold", shared + words(9), 4), Request("one token", words(1), 5, arrival=1))
    again = (
        Request("hit", shared + words(3), 5),
        Request("echo", words(2) + phrase * 6, 10),
        Request("late", words(n // 2), 4, arrival=2),
    )
    return [Trace(first), Trace(again)]


def all_traces(n: int) -> list[Trace]:
    return [lengths(n), *prefixes(n), same_step(n), long_decode(n), crowd(n), repeats(n)]

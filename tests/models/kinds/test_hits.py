"""Prefix hits in models with layers in 16 bits: as long as plain vLLM's, and every token equal to it.

Windows keep no more than their last tokens, and states none, so a hit must not compute anything again that lies before
its end.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from lab import Lab, smallest_pages

from proof.models import named
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle.compare import compare, compare_all
from proof.oracle.trace import Request, Result, Trace

pytestmark = pytest.mark.engine
N = 32
ENGINE: dict[str, Any] = {
    "block_size": N,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "num_gpu_blocks_override": 600,
}


def lossless(**options: Any) -> dict[str, Any]:
    return {"kv_cache_dtype": "lossless", "additional_config": {"kvq": {"W": 32, "S": 4, "recompute": 0, **options}}}


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choice(PROMPT_TOKENS) for _ in range(count))


def conversation() -> list[Trace]:
    """A long prompt, a hit on its first 64 tokens, the prompt again, and two turns that continue it, between which
    others take freed blocks. What the turns say in place of an answer is chosen here."""
    rng = random.Random(7)
    shared, first = words(rng, 64), words(rng, 136)
    turn = shared + first + words(rng, 90)
    others = tuple(Request(f"other{i}", words(rng, 150 + 11 * i), 20, arrival=i) for i in range(3))
    return [
        Trace((Request("cold", shared + first, 24), Request("nested", shared + words(rng, 5), 24, arrival=6))),
        Trace((Request("again", shared + first, 24), *others)),
        Trace((Request("turn 2", turn, 24), Request("again 2", shared + first, 24, arrival=2))),
        Trace((Request("turn 3", turn + words(rng, 70), 24), Request("branch", turn + words(rng, 9), 24, arrival=1))),
    ]


TODO = conversation()
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma-3": ("Gemma-3", {}),
    "Gemma-3 with vision": ("Gemma-3 with vision", {}),
    "Gemma-3n": ("Gemma-3n", {}),
    "Gemma-2": ("Gemma-2", {}),
    "Gemma-4": ("Gemma-4", {}),
    "Command R7B": ("Command R7B", {}),
    "a skipped layer": ("Llama", {"skip_layers": [0]}),
    "Llama 4": ("Llama 4", {}),
    "Granite 4": ("Granite 4", {}),
    "Nemotron-H": ("Nemotron-H", {}),
    "Falcon-H1": ("Falcon-H1", {}),
    "Qwen3-Next": ("Qwen3-Next", {}),
}
RETAINED = [
    ("Gemma-3", 0),
    ("Gemma-3", None),
    ("Gemma-3n", None),
    ("a skipped layer", 0),
    ("Llama 4", 0),
    ("Granite 4", None),
    ("Qwen3-Next", 0),
    *(
        pytest.param(*case, marks=pytest.mark.wide)
        for case in (
            ("Gemma-3 with vision", 0),
            ("Gemma-3 with vision", None),
            ("Gemma-3n", 0),
            ("Gemma-2", 0),
            ("Gemma-2", None),
            ("Gemma-4", 0),
            ("Gemma-4", None),
            ("Command R7B", 0),
            ("Command R7B", None),
            ("Granite 4", 0),
            ("Qwen3-Next", None),
            ("Nemotron-H", 0),
            ("Nemotron-H", None),
            ("Falcon-H1", 0),
            ("Falcon-H1", None),
        )
    ),
]


CROWDED: dict[str, int | None] = {"Gemma-3": None, "Gemma-3n": None, "a skipped layer": 0, "Granite 4": None}
"""Kinds whose engine of plain vLLM, with that retention, also answers `crowded`."""
Plain = Callable[[str, int | None], list[Result]]


@pytest.fixture(scope="module")
def plain(lab: Lab) -> Plain:
    """plain(kind, retention) -> plain vLLM's answers to TODO and, where CROWDED says so, to `crowded` after it. Its
    tokens depend neither on what the cache holds nor on the size of blocks."""

    @functools.cache
    def answers(kind: str, retention: int | None) -> list[Result]:
        todo = [*TODO, *crowded()] if (kind, retention) in CROWDED.items() else TODO
        engine = {**ENGINE, "prefix_cache_retention_interval": retention}
        return lab.run(named(KINDS[kind][0]), todo, kv_cache_dtype="auto", **engine)

    return answers


@pytest.mark.parametrize(("kind", "retention"), RETAINED)
def test_hits_are_plain_vllms(kind: str, retention: int | None, lab: Lab, plain: Plain) -> None:
    """With what vLLM keeps of windows and states by default (the end of a prompt) and with all of it."""
    name, options = KINDS[kind]
    engine = {**ENGINE, "prefix_cache_retention_interval": retention}
    expected = plain(kind, retention)[: len(TODO)]
    got = lab.run(named(name), TODO, **lossless(**options), **engine)
    total = compare_all(TODO, expected, got)
    # in 16 bits sums in another order may change one token; a wrong state or page changes the tokens of every hit
    assert len(total.mismatches) <= (named(name).dtype != "float32")
    if kind == "Gemma-4":  # plain vLLM makes blocks larger until pages of both sizes are equal
        for ours, plain in zip(got, expected, strict=True):
            assert all(ours.cached[name] >= tokens for name, tokens in plain.cached.items())
    elif kind != "Llama 4":  # plain vLLM needs nothing of a chunk that stops where a hit does
        assert [r.cached for r in got] == [r.cached for r in expected]
    # an identical prompt and the next turns hit whatever is kept, a prefix in the middle only where all is; no state is
    # kept in the middle of a chunk
    hit = {request for result in got for request, tokens in result.cached.items() if tokens}
    assert {"again", "again 2", "turn 3", "branch"} <= hit
    assert ("nested" in hit) == (not named(name).hybrid and (retention is None or kind == "a skipped layer"))


@pytest.mark.parametrize(
    ("kind", "retention"),
    [
        ("Gemma-3", None),
        pytest.param("Llama 4", 0, marks=pytest.mark.wide),
        pytest.param("Gemma-3", 0, marks=pytest.mark.wide),
        pytest.param("Gemma-3n", None, marks=pytest.mark.wide),
        pytest.param("Gemma-4", None, marks=pytest.mark.wide),
        pytest.param("Llama 4", None, marks=pytest.mark.wide),
    ],
)
def test_hits_where_windows_have_pages_of_their_own(kind: str, retention: int | None, lab: Lab, plain: Plain) -> None:
    """Hits stop at the end of a packed page."""
    name, options = KINDS[kind]
    todo = [*TODO, *crowded()]
    engine = {**ENGINE, "block_size": 64, "prefix_cache_retention_interval": retention}
    if (kind, retention) in CROWDED.items():
        expected = plain(kind, retention)
    else:
        expected = lab.run(named(name), todo, kv_cache_dtype="auto", **engine)
    few = {"num_gpu_blocks_override": None, "pool": 1.0, "before": smallest_pages}
    got = lab.run(named(name), todo, **lossless(**options), **engine | few)
    assert {beside.block for result in got for beside in result.beside} == {32}
    total = compare_all(todo, expected, got)
    assert not total.mismatches
    assert total.preemptions > 0
    hit = {request: tokens for result in got for request, tokens in result.cached.items() if tokens}
    assert {"again", "turn 3"} <= {*hit}
    assert all(tokens % 64 == 0 for tokens in hit.values())


def crowded() -> list[Trace]:
    """More conversations at once than the pool holds, each asked twice, the last ones first."""
    rng = random.Random(5)
    prompts = [words(rng, 60 + 31 * i) for i in range(6)]
    asked = [*enumerate(prompts)]
    again = Trace(tuple(Request(f"b{i}", p, 60, arrival=5 - i) for i, p in reversed(asked)))
    return [
        Trace(tuple(Request(f"a{i}", p, 60, arrival=i) for i, p in asked)),
        again,
        Trace(tuple(Request(f"c{i}", p + p[:40], 30, arrival=i) for i, p in asked)),
    ]


POOLS = {"Gemma-3": 117, "Gemma-3n": 64, "a skipped layer": 34, "Granite 4": 60}


@pytest.mark.parametrize("kind", POOLS)
def test_recycled_blocks_and_preemption(kind: str, lab: Lab, plain: Plain) -> None:
    """Blocks move between kinds of layers all the time; hits stop before the window here."""
    name, options = KINDS[kind]
    todo, engine = crowded(), {**ENGINE, "prefix_cache_retention_interval": 0 if named(name).hybrid else None}
    expected = plain(kind, CROWDED[kind])[len(TODO) :]
    few = {"num_gpu_blocks_override": POOLS[kind]}
    # a state is kept at the end of a prompt, and a hit that stops earlier finds none
    options = options if named(name).hybrid else {**options, "recompute": 32}
    total = compare_all(todo, expected, lab.run(named(name), todo, **lossless(**options), **engine | few))
    assert not total.mismatches
    assert total.preemptions > 0
    assert total.hits >= 3


def replay(traced: Any) -> None:
    """vLLM's scheduler has the last 96 tokens of every hit computed again."""
    traced.scheduler.prefix_replay_tokens = 96


def test_a_replayed_window_is_noticed(lab: Lab, plain: Plain) -> None:
    """The control: with windows, what precedes a replayed token is gone, and tokens differ."""
    engine, todo = {**ENGINE, "prefix_cache_retention_interval": 0}, TODO[:2]
    arch = named("Gemma-3")
    expected = plain("Gemma-3", 0)
    got: list[Result] = lab.run(arch, todo, prepare=replay, **lossless(), **engine)
    assert not compare(todo[0], expected[0], got[0]).mismatches
    assert any("again" in line for line in compare(todo[1], expected[1], got[1]).mismatches)

"""The replay of whole lives is the step-by-step reference, all at once: equal logits, wherever the scheduler cuts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from proof.oracle.judge import choices_of
from proof.oracle.reference.kinds import Sight
from proof.oracle.reference.lives import Historian, Life, Part
from proof.oracle.reference.replay import Replay, ReplayModel
from proof.oracle.reference.whole import Whole
from proof.oracle.trace import Chunk, Request, Result, Trace
from vllm_kvq.formats.methods.squat import PLAIN

DRAFTS = 3


def life(rng: random.Random, name: str, tokens: list[int], context: int, hit: list[tuple[Life, int]]) -> Life:
    """A prompt in chunks, then steps with drafts, some of which are rejected."""
    made, start = Life(name, Request(name, tuple(tokens[:-40]), 40), tokens, context, hit, len(tokens) - 40), context
    while context < len(tokens) - 40:
        new = min(rng.choice((1, 5, 33, 70, 200)), len(tokens) - 40 - context)
        made.parts.append(Part(context, tuple(tokens[context : context + new]), 0))
        context += new
    while context < len(tokens) - DRAFTS - 1:
        good, bad = rng.randint(0, 2), rng.randint(0, 1)
        guessed = tokens[context : context + 1 + good] + [rng.randint(10, 500) for _ in range(bad)]
        made.parts.append(Part(context, tuple(guessed), good + bad))
        context += 1 + good
    assert made.parts[0].context == start
    return made


def stepwise(model: ReplayModel, lives: list[Life]) -> torch.Tensor:
    replays: dict[Life, Replay] = {}
    logits = []
    for each in lives:
        pages = [replays[writer].page(i) for writer, i in each.hit]
        replay = replays[each] = model.after_hit(pages) if pages else model.request()
        for part in each.parts:
            replay.rewind(part.context)
            logits.append(replay.step(list(part.tokens), len(part.tokens)))
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lossless", {"W": 32, "S": 20}),
        # boosted channels and corrected blocks pass one moved code on to a whole slab, so the plain keys are compared
        ("squat2", PLAIN | {"W": 0, "S": 33}),
        ("squat2", PLAIN | {"S": 4}),
        ("qjl3", {"W": 32, "S": 0}),
        ("polar4", {"W": 64, "S": 64}),
        ("innerq2", {}),
    ],
)
def test_equal_logits(name: str, options: dict[str, int], model: Path) -> None:
    rng = random.Random(1)
    replay = ReplayModel(str(model), name, 64, DRAFTS, **options)

    def words(count: int) -> list[int]:
        return [rng.randint(10, 500) for _ in range(count)]

    shared = words(260)
    first = life(rng, "first", [*shared, *words(70)], 0, [])
    pages = [(first, i) for i in range(4)]
    second = life(rng, "second", [*shared, *words(90)], 256, pages)
    # nested: page 4 is the second's own
    third = life(rng, "third", [*second.tokens[:320], *words(60)], 320, [*pages, (second, 4)])
    lives = [first, second, third]
    whole = Whole(replay, lives)
    expected, got = stepwise(replay, lives), whole.logits(torch.arange(len(whole.plan.tokens)))
    # a code on the border of two cells may fall to either side in a few rows
    near = (expected - got).abs().amax(1) < 1e-2
    assert near.float().mean() > 0.9
    assert (expected.argmax(1) == got.argmax(1)).float().mean() > 0.99


def test_equal_logits_beside_exact_layers(model: Path) -> None:
    """One layer packed and one in 16 bits, with a window or without; the third request hits pages of the first."""
    rng = random.Random(3)
    made = [life(rng, str(i), [rng.randint(10, 500) for _ in range(150 + i)], 0, []) for i in range(2)]
    hit = [(made[0], i) for i in range(2)]
    made.append(life(rng, "hit", [*made[0].tokens[:128], *(rng.randint(10, 500) for _ in range(40))], 128, hit))
    rows, logits = torch.arange(sum(len(p.tokens) for each in made for p in each.parts)), []
    for exact in ({}, {0: Sight()}, {0: Sight(window=48)}, {0: Sight(chunk=48)}, {1: Sight()}):
        replay = ReplayModel(str(model), "squat2", 64, DRAFTS, exact=exact, W=0)
        expected, got = stepwise(replay, made), Whole(replay, made).logits(rows)
        assert ((expected - got).abs().amax(1) < 1e-2).float().mean() > 0.9
        # the same for the hit by itself
        behind = rows[-sum(len(p.tokens) for p in made[2].parts) :]
        assert ((expected - got)[behind].abs().amax(1) < 1e-2).float().mean() > 0.9
        logits.append(got)
    for i, one in enumerate(logits):
        for another in logits[:i]:
            assert ((one - another).abs().amax(1) > 1e-2).float().mean() > 0.2


def test_another_reference_differs(model: Path) -> None:
    """The control: a window of another size changes the logits of most rows."""
    rng = random.Random(2)
    made = life(rng, "one", [rng.randint(10, 500) for _ in range(300)], 0, [])
    narrow, wide = (Whole(ReplayModel(str(model), "squat2", 64, DRAFTS, W=w), [made]) for w in (0, 32))
    rows = torch.arange(100, len(narrow.plan.tokens))
    assert ((narrow.logits(rows) - wide.logits(rows)).abs().amax(1) > 1e-2).float().mean() > 0.5


def test_a_preempted_request_is_judged_only_where_it_chooses(model: Path) -> None:
    """Its second life computes the prompt and its own answer again, and a chunk may end between known tokens."""
    request = Request("r", tuple(range(10, 80)), 9)
    pages = [1, 2]
    first = [Chunk("r-0", 0, 70, [], pages, True), Chunk("r-0", 70, 3, [5, 6], pages)]
    # the first draft was right, the second was not; then it is preempted and begins again in chunks of 72
    again = [Chunk("r-0", 0, 72, [], pages, True), Chunk("r-0", 72, 1, [], pages), Chunk("r-0", 73, 1, [], pages)]
    result = Result({"r": [[4, 5, 7, 8, 9]]}, {}, [[c] for c in first + again], 1, (9, 9))
    historian = Historian(ReplayModel(str(model), "squat2", 64, 2).formats[0])
    historian.add(Trace((request,)), result)
    assert not historian.history.problems
    assert [life.known for life in historian.history.lives] == [70, 73]
    chosen = [(c.position, c.token) for life in historian.history.lives for c in choices_of(life)]
    assert chosen == [(70, 4), (71, 5), (72, 7), (73, 8), (74, 9)]

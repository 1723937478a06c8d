"""An engine's answers against the reference: every greedy token must be the reference's own choice.

The reference goes through the scheduler's chunks and knows positions and what was found in the prefix cache, but no
blocks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proof.oracle.compare import Difference
from proof.oracle.reference.lives import Historian, Life
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.reference.whole import Whole
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict

BRIEF, SOME, MANY = 6, 24, 200
"""Disturbed replays of a mismatch (see `judge`): the first BRIEF of all mismatches together, the rest only of those in
the same lives."""
AT_ONCE = 40
"""Mismatches that are replayed together; the next ones only if all of these were ties."""
LOGITS = 1 << 28
"""Those computed at once, to bound memory: 1 GiB, which is 1,024 tokens of a vocabulary of 262,144."""
GREEDY = 0.01
"""Up to this temperature (vLLM's smallest) a sample is judged like a greedy one: n > 1 samples can't be greedy."""
FORBIDDEN = -1e6
"""The logit of a token that structured output rules out."""
NEVER = 25.0
"""exp(-25): two logits whose difference over the temperature is larger are never mistaken for each other."""


@dataclass(frozen=True)
class Choice:
    """A token of the answer and where the reference chooses it."""

    life: Life
    part: int
    position: int
    token: int

    def __str__(self) -> str:
        return f"{self.life.name}: position {self.position}"


def judge(model: ReplayModel, traces: Sequence[Trace], results: Sequence[Result]) -> Verdict:
    """All traces of one engine. A token that the reference would not choose is a mismatch, unless rounding decides it.

    A code that lies on the border of two cells is rounded differently by two correct float32 programs, and all later
    logits move. So mismatches are tried again with the reference's queries, keys and values disturbed by 1e-6 and its
    outputs by the kernels' declared error. A token is a tie if one of these replays chooses it, or if in one its logit
    comes closer to the chosen one's than the standard deviation with which their distance varies over these replays:
    a wrong read moves logits by far more than that. The distance often has two values, because a code is rounded up
    or down, and the engine's may be the rarer one: hence the number of replays. Ties are counted, not hidden.

    One mismatch is enough: what follows from it, often hundreds of tokens, is counted but not replayed again.
    """
    historian, total = Historian(model.formats[0]), Verdict()
    for trace, result in zip(traces, results, strict=True):
        historian.add(trace, result)
        historian.history.problems += result.changed
        total.requests += len(trace.requests)
        total.preemptions += result.preemptions
        total.aborts += len(result.aborted)
        total.stops += result.stopped
    history = historian.history
    total.hits, total.hit_tokens = history.hits, history.hit_tokens
    total.accepted, total.rejected = history.accepted, history.rejected
    if history.problems:
        # the lives are not to be trusted
        total.mismatches = sorted(history.problems)
        return total
    choices = [c for life in history.lives for c in choices_of(life)]
    total.tokens = len(choices)
    model.noise = None
    at_once = max(1, LOGITS // model.vocabulary.size)
    pieces = [choices[i : i + at_once] for i in range(0, len(choices), at_once)]
    gaps = [gap for some in pieces for gap in _behind(model, _needed(history.lives, some), some)]
    wrong = {c: [gap] for c, gap in zip(choices, gaps, strict=True) if gap > 0}
    left: list[Choice] = []
    tried = 0
    while tried < len(wrong) and not left:
        some = dict(list(wrong.items())[tried : tried + AT_ONCE])
        left = _unexplained(model, history.lives, some)
        tried += len(some)
    total.ties = tried - len(left)
    total.mismatches = sorted(map(str, left))
    if tried < len(wrong):
        total.mismatches.append(
            f"{len(wrong) - tried} more tokens that the reference would not choose, not tried again"
        )
    return total


def _unexplained(model: ReplayModel, lives: Sequence[Life], wrong: dict[Choice, list[float]]) -> list[Choice]:
    """The choices (each with its first gap) that rounding does not explain; see `judge`."""
    left = _try(model, lives, wrong, list(wrong), range(BRIEF))
    while left:
        needed = _needed(lives, left[:1])
        some = together = [c for c in left if _needed(lives, [c]) == needed]
        for seeds in (range(BRIEF, SOME), range(SOME, MANY)):
            some = _try(model, lives, wrong, some, seeds)
            some = [c for c in some if min(wrong[c]) > statistics.stdev(wrong[c])]
        left = [c for c in left if c in some or c not in together]
        if some:
            break
    return left


def _try(
    model: ReplayModel, lives: Sequence[Life], wrong: dict[Choice, list[float]], some: list[Choice], seeds: range
) -> list[Choice]:
    """Appends the gaps of disturbed replays to `wrong`; returns the choices that none of the replays makes."""
    for seed in seeds:
        if not some:
            break
        model.perturb(seed)
        for choice, gap in zip(some, _behind(model, _needed(lives, some), some), strict=True):
            wrong[choice].append(gap)
        some = [c for c in some if wrong[c][-1] > 0]
    model.noise = None
    return some


def choices_of(life: Life) -> list[Choice]:
    """The token behind each chunk and, as long as drafts were accepted, those behind them."""
    found = []
    if life.request.temperature > GREEDY:
        return []
    for i, part in enumerate(life.parts):
        drafts = part.tokens[len(part.tokens) - part.drafts :]
        for draft, position in zip([*drafts, None], range(part.known, part.end + 1), strict=True):
            if not life.known <= position < len(life.tokens):
                break
            token = life.tokens[position]
            found.append(Choice(life, i, position, token))
            if draft != token:
                break
    return found


@torch.inference_mode()
def _behind(model: ReplayModel, lives: Sequence[Life], choices: Sequence[Choice]) -> list[float]:
    """By how much the reference prefers another token, beyond what the temperature allows; 0 or less: it agrees."""
    if not choices:
        return []
    whole = Whole(model, lives)
    rows = torch.tensor([whole.plan.row(c.life, c.part, c.position - 1) for c in choices])
    logits = whole.logits(rows)
    for row, choice in zip(logits, choices, strict=True):
        if choice.life.request.letters:
            row[~model.vocabulary.allowed(choice.life.request)] = FORBIDDEN
    token = torch.tensor([c.token for c in choices])[:, None]
    behind = logits.amax(1) - logits.gather(1, token)[:, 0]
    allowed = torch.tensor([NEVER * c.life.request.temperature for c in choices])
    return (behind - allowed).tolist()


def distance(model: ReplayModel, traces: Sequence[Trace], results: Sequence[Result], found: Difference) -> float:
    """How far apart the reference's logits of the two tokens are, after the tokens of the second engine (`results`).

    Request names must be unique over the traces.
    """
    historian = Historian(model.formats[0])
    for trace, result in zip(traces, results, strict=True):
        historian.add(trace, result)
    a, b = found.tokens
    name = f"{found.request}[{found.sample}]"
    choices = [c for life in historian.history.lives if life.name == name for c in choices_of(life)]
    choices = [c for c in choices if c.position == len(c.life.request.prompt) + found.at]
    if a is None or b is None or not choices:
        return math.inf
    whole = Whole(model, _needed(historian.history.lives, choices))
    row = whole.plan.row(choices[0].life, choices[0].part, choices[0].position - 1)
    logits = whole.logits(torch.tensor([row]))[0]
    return abs(float(logits[a] - logits[b]))


def _needed(lives: Sequence[Life], choices: Sequence[Choice]) -> list[Life]:
    """The lives of these choices and all that they hit, writers first."""
    wanted = {c.life for c in choices}
    for life in reversed(lives):
        if life in wanted:
            wanted |= life.writers
    return [life for life in lives if life in wanted]

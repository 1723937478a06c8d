"""Judges: is what the engine answered what it must answer?

`compare` holds two engines' answers to the same traces against each other, token by token (plain vLLM against
`lossless`). `judge` goes through the scheduler's chunks with the reference, which is told positions and what was
cached, but no blocks, and wants every greedy token to be the reference's own choice (lossy formats).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_kvq.formats.reference import CachedPage
from vllm_kvq.oracle.replay import Replay, ReplayModel
from vllm_kvq.oracle.trace import Chunk, Request, Result, Trace

PERTURBED = 4
"""Replays with float32 noise that a mismatch has to survive (see `judge`)."""


@dataclass
class Verdict:
    requests: int = 0
    tokens: int = 0
    ties: int = 0
    hits: int = 0
    preemptions: int = 0
    rejected: int = 0
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        for name in ("requests", "tokens", "ties", "hits", "preemptions", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.mismatches += other.mismatches


def compare(trace: Trace, expected: Result, got: Result) -> Verdict:
    verdict = Verdict(len(trace.requests), preemptions=got.preemptions, hits=sum(c > 0 for c in got.cached.values()))
    for r in trace.requests:
        for i, (a, b) in enumerate(zip(expected.outputs[r.name], got.outputs[r.name], strict=True)):
            # an aborted request may stop some tokens earlier or later under speculation
            length = min(len(a), len(b)) if r.abort_after is not None else max(len(a), len(b))
            verdict.tokens += length
            if a[:length] != b[:length]:
                at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                verdict.mismatches.append(f"{r.name}[{i}]: token {at} of {length}")
    if got.free_blocks[0] != got.free_blocks[1]:
        verdict.mismatches.append(f"{got.free_blocks[0] - got.free_blocks[1]} blocks were not freed")
    return verdict


class _Sequence:
    """One sample of one request as the replay goes along."""

    def __init__(self, request: Request, output: list[int]) -> None:
        self.request, self.tokens = request, [*request.prompt, *output]
        self.replay: Replay | None = None

    @property
    def judged(self) -> bool:
        return self.request.temperature == 0


def judge(model: ReplayModel, traces: Sequence[Trace], results: Sequence[Result]) -> Verdict:
    """All traces of one engine. A token that the reference would not choose is a mismatch, unless rounding decides it.

    A code that lies on the border of two cells is rounded differently by two correct float32 programs, and all later
    logits move. So mismatches are tried again with the reference's queries, keys and values disturbed by 1e-6 and its
    outputs by the kernels' declared error, and a token that one of these replays does choose is a tie. Ties are
    counted, not hidden.
    """
    total = _all(model, traces, results)
    left = set(total.mismatches)
    for seed in range(1, PERTURBED + 1):
        if not left:
            break
        model.perturb(seed)
        left &= set(_all(model, traces, results).mismatches)
    total.ties = len(total.mismatches) - len(left)
    total.mismatches = sorted(left)
    return total


def _all(model: ReplayModel, traces: Sequence[Trace], results: Sequence[Result]) -> Verdict:
    replayer, total = Replayer(model), Verdict()
    for trace, result in zip(traces, results, strict=True):
        total.add(replayer.run(trace, result))
    return total


class Replayer:
    """Keeps the prefix cache between the traces of one engine: what each block holds, by the tokens up to its end."""

    def __init__(self, model: ReplayModel) -> None:
        self.model = model
        self.fmt = model.formats[0]
        self.pages: dict[tuple[int, tuple[int, ...]], list[CachedPage]] = {}

    def run(self, trace: Trace, result: Result) -> Verdict:
        verdict = Verdict(len(trace.requests), preemptions=result.preemptions)
        sequences: dict[str, _Sequence] = {}
        for step in result.steps:
            waiting = list(step)
            while waiting:
                # a request may hit a page that another one completes in this very step
                ready = [c for c in waiting if self._found(_of(sequences, trace, result, c), c)]
                if not ready:
                    verdict.mismatches.append(f"{waiting[0].request}: hit a page that nobody has written")
                    return verdict
                for chunk in ready:
                    self._chunk(sequences[chunk.request], chunk, verdict)
                    waiting.remove(chunk)
        return verdict

    def _admitted(self, s: _Sequence, c: Chunk) -> bool:
        """Whether this chunk begins the request, for the first time or after a preemption."""
        return s.replay is None or c.context < s.replay.length - self.model.num_spec

    def _hit(self, s: _Sequence, c: Chunk) -> list[tuple[int, tuple[int, ...]]]:
        n = self.fmt.N
        count = (c.context + self.fmt.W) // n if c.context else 0
        return [(c.pages[i], tuple(s.tokens[: (i + 1) * n])) for i in range(count)]

    def _found(self, s: _Sequence, c: Chunk) -> bool:
        return not self._admitted(s, c) or all(key in self.pages for key in self._hit(s, c))

    def _chunk(self, s: _Sequence, c: Chunk, verdict: Verdict) -> None:
        if self._admitted(s, c):
            hit = [self.pages[key] for key in self._hit(s, c)]
            s.replay = self.model.after_hit(hit) if hit else self.model.request()
            verdict.hits += bool(hit)
        assert s.replay is not None
        if c.context < s.replay.length:
            verdict.rejected += s.replay.length - c.context
            s.replay.rewind(c.context)
        known = c.tokens - len(c.drafts)
        tokens = s.tokens[c.context : c.context + known]
        if len(tokens) < known:
            return  # scheduled ahead of an abort: nothing of it is in the answer
        logits = s.replay.step(tokens + c.drafts, 1 + len(c.drafts))
        self._judge(s, c.context + known, logits, c.drafts, verdict)
        self._publish(s, c, c.context + known)

    def _judge(self, s: _Sequence, position: int, logits: object, drafts: list[int], verdict: Verdict) -> None:
        """The token at `position` and, as long as drafts were accepted, those behind it."""
        for row, draft in zip(logits, [*drafts, None], strict=True):  # type: ignore[call-overload]
            if not s.judged or not len(s.request.prompt) <= position < len(s.tokens):
                return
            token = s.tokens[position]
            verdict.tokens += 1
            if int(row.argmax()) != token:
                verdict.mismatches.append(f"{s.request.name}: position {position}")
            if draft != token:
                return
            position += 1

    def _publish(self, s: _Sequence, c: Chunk, length: int) -> None:
        """Pages that this chunk completed, drafts aside."""
        n = self.fmt.N
        assert s.replay is not None
        for i in range(c.context // n, length // n):
            if i * n >= s.replay.caches[0].own:
                self.pages[c.pages[i], tuple(s.tokens[: (i + 1) * n])] = s.replay.page(i)


def _of(sequences: dict[str, _Sequence], trace: Trace, result: Result, c: Chunk) -> _Sequence:
    if c.request not in sequences:
        sequences[c.request] = _sequence(trace, result, c.request)
    return sequences[c.request]


def _sequence(trace: Trace, result: Result, internal: str) -> _Sequence:
    """vLLM calls sample i of request R `i_R-suffix`, a single sample `R-suffix`."""
    by_name = {r.name: r for r in trace.requests}
    name = internal.rsplit("-", 1)[0]
    if name in by_name:
        return _Sequence(by_name[name], result.outputs[name][0])
    index, name = name.split("_", 1)
    return _Sequence(by_name[name], result.outputs[name][int(index)])

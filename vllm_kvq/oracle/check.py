"""Judges: is what the engine answered what it must answer?

`compare` holds two engines' answers to the same traces against each other, token by token (plain vLLM against
`lossless`). `replay` goes through the scheduler's chunks with the reference, which is told positions and what was
cached, but no blocks, and wants every greedy token to be the reference's own choice (lossy formats).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_kvq.formats.reference import CachedPage
from vllm_kvq.oracle.replay import Replay, ReplayModel
from vllm_kvq.oracle.trace import Chunk, Request, Result, Trace

TIE = 2e-3
"""Logits this close count as a tie: float32 sums in another order decide it. They are counted, not hidden."""


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


def replay(trace: Trace, result: Result, model: ReplayModel) -> Verdict:
    """All chunks of a trace on a fresh prefix cache, in the scheduler's order."""
    return Replayer(model).run(trace, result)


class Replayer:
    """Keeps the prefix cache between the traces of one engine."""

    def __init__(self, model: ReplayModel) -> None:
        self.model = model
        self.fmt = model.formats[0]
        self.pages: dict[tuple[int, ...], list[CachedPage]] = {}

    def run(self, trace: Trace, result: Result) -> Verdict:
        verdict = Verdict(len(trace.requests), preemptions=result.preemptions)
        sequences: dict[str, _Sequence] = {}
        for step in result.steps:
            # pages become visible to other requests in the step that completes them
            for chunk in step:
                if chunk.request not in sequences:
                    sequences[chunk.request] = _sequence(trace, result, chunk.request)
            for chunk in step:
                self._chunk(sequences[chunk.request], chunk, verdict)
        return verdict

    def _chunk(self, s: _Sequence, c: Chunk, verdict: Verdict) -> None:
        if s.replay is None or c.context < s.replay.length - self.model.num_spec:
            s.replay = self._admit(s, c.context)
            verdict.hits += c.context > 0
        elif c.context < s.replay.length:
            verdict.rejected += s.replay.length - c.context
            s.replay.rewind(c.context)
        known = c.tokens - len(c.drafts)
        tokens = s.tokens[c.context : c.context + known]
        if len(tokens) < known:
            return  # scheduled ahead of an abort: nothing of it is in the answer
        logits = s.replay.step(tokens + c.drafts, 1 + len(c.drafts))
        self._judge(s, c.context + known, logits, c.drafts, verdict)
        if not c.drafts:
            self._publish(s)

    def _judge(self, s: _Sequence, position: int, logits: object, drafts: list[int], verdict: Verdict) -> None:
        """The token at `position` and, as long as drafts were accepted, those behind it."""
        for row, draft in zip(logits, [*drafts, None], strict=True):  # type: ignore[call-overload]
            if not s.judged or not len(s.request.prompt) <= position < len(s.tokens):
                return
            token = s.tokens[position]
            verdict.tokens += 1
            if int(row.argmax()) != token:
                gap = float(row.max() - row[token])
                verdict.ties += gap <= TIE
                if gap > TIE:
                    verdict.mismatches.append(f"{s.request.name}: position {position}, logit gap {gap:.3g}")
            if draft != token:
                return
            position += 1

    def _admit(self, s: _Sequence, context: int) -> Replay:
        n = self.fmt.N
        hit = (context + self.fmt.W) // n if context else 0
        usable = (len(s.request.prompt) - 1) // n
        self._forget_evicted(s, hit, usable)
        if not hit:
            return self.model.request()
        return self.model.after_hit([self.pages[tuple(s.tokens[: (i + 1) * n])] for i in range(hit)])

    def _forget_evicted(self, s: _Sequence, hit: int, usable: int) -> None:
        """Pages that a request could have used and did not find are gone from the cache."""
        n = self.fmt.N
        if not hit and usable * n <= self.fmt.W:
            return  # a hit no longer than the window is not taken
        for i in range(hit, usable):
            self.pages.pop(tuple(s.tokens[: (i + 1) * n]), None)

    def _publish(self, s: _Sequence) -> None:
        n = self.fmt.N
        assert s.replay is not None
        last = s.replay.length // n
        for i in range(last):
            key = tuple(s.tokens[: (i + 1) * n])
            if key not in self.pages:
                self.pages[key] = s.replay.page(i)


def _sequence(trace: Trace, result: Result, internal: str) -> _Sequence:
    """vLLM calls sample i of request R `i_R-suffix`, a single sample `R-suffix`."""
    by_name = {r.name: r for r in trace.requests}
    name = internal.rsplit("-", 1)[0]
    if name in by_name:
        return _Sequence(by_name[name], result.outputs[name][0])
    index, name = name.split("_", 1)
    return _Sequence(by_name[name], result.outputs[name][int(index)])

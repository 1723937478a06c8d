"""Two engines' answers to the same traces, token by token: plain vLLM's, and those under `lossless`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict, leaks


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers: at the `at`-th token of a sample."""

    request: str
    sample: int
    at: int
    length: int
    tokens: tuple[int | None, int | None]

    def __str__(self) -> str:
        return f"{self.request}[{self.sample}]: token {self.at} of {self.length}"


def differences(trace: Trace, expected: Result, got: Result) -> list[Difference]:
    found = []
    for r in trace.requests:
        for i, (a, b) in enumerate(zip(expected.outputs[r.name], got.outputs[r.name], strict=True)):
            # an aborted request may stop a few tokens earlier or later under speculation
            length = min(len(a), len(b)) if r.abort_after is not None else max(len(a), len(b))
            if a[:length] != b[:length]:
                at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                pair = a[at] if at < len(a) else None, b[at] if at < len(b) else None
                found.append(Difference(r.name, i, at, length, pair))
    return found


def compare(trace: Trace, expected: Result, got: Result) -> Verdict:
    verdict = Verdict(len(trace.requests), preemptions=got.preemptions, hits=sum(c > 0 for c in got.cached.values()))
    for r in trace.requests:
        for a, b in zip(expected.outputs[r.name], got.outputs[r.name], strict=True):
            verdict.tokens += min(len(a), len(b)) if r.abort_after is not None else max(len(a), len(b))
    verdict.mismatches += map(str, differences(trace, expected, got))
    verdict.mismatches += [*got.changed, *leaks(got)]
    return verdict


def compare_all(traces: Sequence[Trace], expected: Sequence[Result], got: Sequence[Result]) -> Verdict:
    total = Verdict()
    for trace, a, b in zip(traces, expected, got, strict=True):
        total.add(compare(trace, a, b))
    return total

"""The findings of a judge: counts, and one line for each mismatch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from proof.oracle.trace import Result


@dataclass
class Verdict:
    requests: int = 0
    tokens: int = 0
    ties: int = 0
    hits: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    accepted: int = 0
    rejected: int = 0
    aborts: int = 0
    stops: int = 0
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


def leaks(result: Result) -> list[str]:
    before, after = result.free_blocks
    return [] if before == after else [f"{before - after} blocks were not freed"]

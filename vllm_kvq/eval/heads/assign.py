"""Assignments of formats to layers: all that vLLM can serve, and the best within a budget of bits.

An assignment names a choice for each layer, or None for one that is not packed. Today a server has one format for all
packed layers (`skip_layers` names the others), so `servable` returns those; if servers support more, extend it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.heads.heads import HeadError

Errors = Mapping[int, float]
"""Layer -> mean over its KV heads of the squared relative error of attention's output."""
Bits = Callable[[Choice], float | None]
"""Bits per element, everything counted; None if a server would not start with it."""


@dataclass(frozen=True)
class Assignment:
    layers: Mapping[int, Choice | None]

    @property
    def choice(self) -> Choice:
        """The choice of the packed layers, with the layers that it does not pack."""
        packed = {c.label: c for c in self.layers.values() if c is not None}
        if len(packed) != 1:
            raise ValueError(f"a server has one format for all packed layers, not {len(packed)}")
        (one,) = packed.values()
        skipped = sorted(index for index, c in self.layers.items() if c is None)
        return Choice(one.format, {**one.options, "skip_layers": skipped}) if skipped else one

    def error(self, measured: Mapping[str, Errors]) -> float:
        """Root mean square over layers, by the errors of each choice's label."""
        squares = [0.0 if c is None else measured[c.label][index] for index, c in self.layers.items()]
        return float((sum(squares) / len(squares)) ** 0.5)


@dataclass(frozen=True)
class Candidate:
    assignment: Assignment
    bits: float
    error: float

    def document(self) -> dict[str, Any]:
        choice = self.assignment.choice
        return {"format": choice.format, "options": dict(choice.options), "bits": self.bits, "error": self.error}


def by_layer(heads: Iterable[HeadError]) -> Errors:
    found: dict[int, list[float]] = {}
    for e in heads:
        found.setdefault(e.layer, []).append(e.output**2)
    return {layer: sum(squares) / len(squares) for layer, squares in found.items()}


def servable(
    measured: Mapping[str, Errors], choices: Iterable[Choice], bits: Bits, budget: float
) -> Iterator[Candidate]:
    """Each choice for all layers; and, within the budget, without packing its worst layers."""
    for choice in choices:
        errors = measured[choice.label]
        worst_first = sorted(errors, key=lambda layer: -errors[layer])
        for skipped in range(len(errors)):
            kept = {*worst_first[:skipped]}
            assignment = Assignment({layer: None if layer in kept else choice for layer in errors})
            taken = bits(assignment.choice)
            if taken is None:
                break
            yield Candidate(assignment, taken, assignment.error(measured))
            if taken > budget:
                break


def best(candidates: Iterable[Candidate], budget: float) -> Candidate | None:
    """The assignment with the smallest error within the budget; among equal ones, that with the fewest bits."""
    within = [c for c in candidates if c.bits <= budget]
    return min(within, key=lambda c: (c.error, c.bits), default=None)

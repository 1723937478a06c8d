"""What the checks find about a format at one head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvq.eval.conformance.checks import CHECKS
from vllm_kvq.eval.conformance.trial import Trial
from vllm_kvq.formats import contract
from vllm_kvq.formats.table import Format


@dataclass(frozen=True)
class Report:
    """Of one head size: bits and errors, and a sentence for each check that failed; or why it is refused."""

    head_size: int
    refused: str | None = None
    bits: float = 0.0
    key_error: float | None = None
    value_error: float | None = None
    """Relative errors; None where a check failed, because they would mean nothing."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """By the check's name."""

    @property
    def passed(self) -> bool:
        return self.refused is None and not self.faults


def conform(fmt: Format, head_size: int, options: Mapping[str, Any] | None = None) -> Report:
    try:
        trial = Trial.of(fmt, head_size, options)
    except ValueError as refusal:
        return Report(head_size, refused=str(refusal))
    faults: dict[str, str] = {}
    for check in CHECKS:
        try:
            found = check.find(trial)
        except Exception as error:
            found = contract.raised(error)
        if found is not None:
            faults[check.name] = found
            if check.stops:
                return Report(head_size, bits=trial.page.bits_per_element, faults=faults)
    bits = trial.page.bits_per_element
    return Report(head_size, None, bits, faults=faults) if faults else Report(head_size, None, bits, *trial.errors())

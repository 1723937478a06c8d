"""All faults, by what they are planted in."""

from __future__ import annotations

from proof.mutants import command_line, formats, integration, kernels, tools
from proof.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *formats.FAULTS,
    *kernels.FAULTS,
    *integration.FAULTS,
    *tools.FAULTS,
    *command_line.FAULTS,
)

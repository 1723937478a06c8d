"""Faults in what judges: fuzz, soak, oracle, bench, the command line."""

from __future__ import annotations

from proof.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = ()

"""All faults, by the code in which they are planted: those of every module below `faults`."""

from __future__ import annotations

import importlib
from pathlib import Path

from proof.mutants.fault import Fault

PLACES = tuple(
    importlib.import_module(".".join((__package__, *path.relative_to(Path(__file__).parent).with_suffix("").parts)))
    for path in sorted(Path(__file__).with_name("faults").rglob("[!_]*.py"))
)
FAULTS: tuple[Fault, ...] = tuple(fault for place in PLACES for fault in place.FAULTS)

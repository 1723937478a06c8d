"""All faults, by the code in which they are planted."""

from __future__ import annotations

from itertools import chain

from proof.mutants.fault import Fault
from proof.mutants.faults import (
    benches,
    blocks,
    command_line,
    configured,
    constants,
    cpp,
    files,
    formats,
    gpu,
    gpu_transformed,
    integration,
    judges,
    measured,
    planned,
    served,
    tools,
    views,
)

PLACES = (
    formats,
    planned,
    cpp,
    gpu,
    gpu_transformed,
    served,
    integration,
    blocks,
    tools,
    benches,
    files,
    constants,
    command_line,
    views,
    configured,
    measured,
    judges,
)
FAULTS: tuple[Fault, ...] = tuple(chain.from_iterable(place.FAULTS for place in PLACES))

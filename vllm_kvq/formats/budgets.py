"""Names of budgets: `kvq4`, `kvq3` and `kvq2` mean the most precise format at 4, 3 and 2 bits that a server can have.

A budget is not a format. A server takes the first of its formats that it can serve with fast kernels
(integration/plan/budgets.py), says which one that is, and from there on is a server of that format. The order follows
docs/quality.md; a release that changes what a name means says so in the CHANGELOG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    name: str
    most: float
    """Bits per element of pages, at head size 128 and N = 128."""
    formats: tuple[str, ...]
    """The most precise one first."""

    def __post_init__(self) -> None:
        if not self.name or not self.formats or not 0 < self.most < 16:
            raise ValueError(f"budget {self.name!r} needs a name, a number of bits below 16 and a format")


BUDGETS: Mapping[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("kvq4", 4.3, ("klt4", "polar4", "kitty2")),
        Budget("kvq3", 3.3, ("klt3", "kitty2")),
        Budget("kvq2", 2.4, ("klt2",)),
    )
}
RECOMMENDED = "kvq3"
"""What the documents' first examples name."""

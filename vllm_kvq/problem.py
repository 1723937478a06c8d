"""What is wrong, and the way out: every `*_problem` answers with this, or with None.

A function that only gives a reason, which completes its caller's sentence, is called `why_not`; a command's `wrong_*`
gives the whole sentence, which its parser prints.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """`str` of it is the sentence that users read."""

    what: str
    instead: str
    """What to do instead."""

    def __post_init__(self) -> None:
        if not self.what or not self.instead:
            raise ValueError("a problem needs to say what is wrong and what to do instead")

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"


class Refused(Exception):
    """A model, option or shape that the format can't serve.

    Not a ValueError: pydantic, with which vLLM makes its configuration, would wrap it, and the sentence would appear
    below "1 validation error for VllmConfig".
    """

"""What a misspelt word was meant to be: for every sentence that says "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

USUAL, SURE = 0.6, 0.75
"""How alike two words must be: where few are known, and where the word may be something else."""


def meant(word: object, known: Iterable[str], alike: float = USUAL) -> str | None:
    """The known word that is most like this one, whatever the case of its letters; None if none is."""
    by_letters: dict[str, list[str]] = {}
    for name in known:
        by_letters.setdefault(name.casefold(), []).append(name)
    close = difflib.get_close_matches(str(word).casefold(), by_letters, n=1, cutoff=alike)
    if not close:
        return None
    return max(by_letters[close[0]], key=lambda name: sum(a == b for a, b in zip(name, str(word), strict=False)))

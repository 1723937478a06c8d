"""The bundled texts as pieces of tokens: prose, code, data, chats and mathematics, in sixteen languages.

Variety counts, not length: every text gives the same number of tokens. Pieces are short, and stand at positions from
the first to `FARTHEST`: scores see only distances, but RoPE turns keys by their positions, and the covariance of keys
is that of all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

TEXTS = Path(__file__).parent / "texts"
TOKENS = 4096
"""Of all pieces together, at most."""
FARTHEST = 8192


class Pieces(NamedTuple):
    tokens: torch.Tensor
    """(pieces, length) ids."""
    start: torch.Tensor
    """(pieces,) the position of each piece's first token."""

    @property
    def positions(self) -> torch.Tensor:
        """(pieces, length)"""
        return self.start[:, None] + torch.arange(self.tokens.shape[1])


def texts() -> list[str]:
    return [path.read_text("utf-8") for path in sorted(TEXTS.glob("*.txt"))]


def pieces(tokenizer: Any, longest: int, tokens: int = TOKENS) -> Pieces:
    """One piece of each text, for a model of at most `longest` positions."""
    found = texts()
    first = list(tokenizer("").input_ids)[:1]
    encoded = [first + list(tokenizer(text, add_special_tokens=False).input_ids) for text in found]
    length = min(tokens // len(found), longest, *map(len, encoded))
    ids = torch.tensor([of_text[:length] for of_text in encoded])
    # neighbouring texts are alike, and stand far apart
    order = torch.arange(len(found)) * 5 % len(found)
    room = max(0, min(longest, FARTHEST) - length)
    return Pieces(ids, order * room // max(1, len(found) - 1))

"""Texts as pieces of tokens: the user's, or the bundled ones, which are prose, code, data, chats and mathematics, in
sixteen languages.

Variety counts, not length: every bundled text gives the same number of tokens. Pieces are short, and stand at positions
from the first to `FARTHEST`: scores see only distances, but RoPE turns keys by their positions, and the covariance of
keys is that of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

TEXTS = Path(__file__).parent / "texts"
TOKENS = 4096
"""The most that all pieces have together."""
FARTHEST = 8192
PIECE = 256
"""Tokens of a piece of the user's texts."""
LEAST, MOST = 1024, 16384
"""Tokens of the user's texts together."""


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


def bundled(tokenizer: TokenizerLike, longest: int) -> Pieces:
    """One piece of each text, for a model of at most `longest` positions."""
    found = texts()
    first = list(tokenizer("").input_ids)[:1]
    encoded = [first + list(tokenizer(text, add_special_tokens=False).input_ids) for text in found]
    length = min(TOKENS // len(found), longest, *map(len, encoded))
    ids = torch.tensor([of_text[:length] for of_text in encoded])
    # neighbouring texts are alike, and stand far apart
    order = torch.arange(len(found)) * 5 % len(found)
    room = max(0, min(longest, FARTHEST) - length)
    return Pieces(ids, order * room // max(1, len(found) - 1))


def pieces(tokenizer: TokenizerLike, texts: Sequence[str], longest: int) -> Pieces:
    """Evenly spread over all these texts. ValueError, with a sentence, if they are too short."""
    first = list(tokenizer("").input_ids)[:1]
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False).input_ids]
    if problem := too_short(len(ids)):
        raise ValueError(problem)
    own = min(PIECE, longest) - len(first)
    count = min(len(ids) // own, MOST // PIECE)
    begins = [i * (len(ids) - own) // max(1, count - 1) for i in range(count)]
    found = torch.tensor([first + ids[begin : begin + own] for begin in begins])
    # neighbours stand far apart, whatever their number is: parts of the golden ratio
    room = max(0, min(longest, FARTHEST) - found.shape[1])
    return Pieces(found, (torch.arange(count) * 0.618033988749895 % 1 * room).long())


def too_short(tokens: int) -> str | None:
    if tokens >= LEAST:
        return None
    return f"the text has {tokens:,} tokens, too few to fit constants to; give {LEAST:,} or more, with several --text"


def hardly_known(tokens: torch.Tensor) -> bool:
    """Whether most of the text is one token, as for a model of something other than text: `<unk>` stands for it all."""
    _, counts = tokens.unique(return_counts=True)
    return 2 * int(counts.max()) > tokens.numel()

"""The tokens that a format hurt most, as tables: each token in its text."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_kvq.console import Table
from vllm_kvq.eval.results.result import Hurt, Row

AROUND = 32
"""The number of characters shown before and after a token."""
MOST = 5
"""Tokens per format and task, unless the user wants more."""
FIGURES = ("position", "KL", "p in 16 bits", "p")


def hurt_tables(rows: Iterable[Row], most: int) -> list[Table]:
    """A table for each row that lists tokens: each token in its text, in brackets."""
    return [
        Table(["text", *FIGURES], [_cells(h) for h in row.hurt[:most]], title=_title(row))
        for row in rows
        if row.hurt and most > 0
    ]


def around(hurt: Hurt) -> tuple[str, str, str]:
    """The text before the token, the token, and the text after it, without line ends."""
    return _line(hurt.before)[-AROUND:], _line(hurt.token), _line(hurt.after)[:AROUND]


def figures(hurt: Hurt) -> list[str]:
    return [str(hurt.position), f"{hurt.kl:.3g}", f"{hurt.probability_bf16:.3f}", f"{hurt.probability:.3f}"]


def _title(row: Row) -> str:
    return f"{row.label}, {row.task}, {row.context} tokens, {row.regime}: the tokens that were hurt most"


def _cells(hurt: Hurt) -> list[str]:
    return ["{}[{}]{}".format(*around(hurt)), *figures(hurt)]


def _line(text: str) -> str:
    """Line ends and tabs as escapes."""
    return text.encode("unicode_escape").decode() if not text.isprintable() else text

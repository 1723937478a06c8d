"""What a process that is gone said last."""

from __future__ import annotations

from pathlib import Path


def last_line(log: Path) -> str | None:
    """The last line of a log that says something; None if none does, or if there is no log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)

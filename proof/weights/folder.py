"""Where to find the real models that `python -m proof weights` has brought."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "KVQ_WEIGHTS"
"""Names the folder."""


def folder() -> Path:
    return Path(os.environ.get(VARIABLE) or ".weights").absolute()


def missing(name: str) -> str | None:
    """How to get this model, if it is not there."""
    if (folder() / name / "config.json").exists():
        return None
    return f"{name} is not there: python -m proof weights {folder()} {name}, then set {VARIABLE}={folder()}"

"""The model that the word `demo` stands for: the one that is kept in the repository."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "demo_model"


def demo_model_path() -> Path:
    if not (FOLDER / "config.json").is_file():
        raise ValueError("the demo model is not here: it is kept in the repository, not in a wheel; name another model")
    return FOLDER

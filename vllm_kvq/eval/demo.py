"""The demo model: small, and trained to show damage to its cache. It is part of a checkout, not of a wheel."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def demo_model() -> Path:
    if not (DEMO / "config.json").exists():
        raise FileNotFoundError(f"the demo model is not at {DEMO}: it comes with a checkout of the repository")
    return DEMO

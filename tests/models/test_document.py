"""docs/models.md is what the table prints."""

from pathlib import Path

from proof.models import ARCHITECTURES
from proof.models.document import page

DOC = Path(__file__).parents[2] / "docs" / "models.md"


def test_page() -> None:
    assert DOC.read_text(encoding="utf-8") == page() + "\n", "run python -m proof models > docs/models.md"


def test_names_are_distinct() -> None:
    assert len({a.slug for a in ARCHITECTURES}) == len(ARCHITECTURES)

"""The documents as a site: mkdocs.yml builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFIGURATION = "mkdocs.yml"
PARTS = ("docs", "docker", "examples", "models", "packaging", "scripts")
"""The folders that pages link to."""

pytest.importorskip("material", reason="mkdocs-material is not installed: python3 scripts/bootstrap.py brings it")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # not --quiet, under which --strict counts no warnings
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_document_is_in_the_navigation(site: Path) -> None:
    navigation = (ROOT / CONFIGURATION).read_text(encoding="utf-8").partition("\nnot_in_nav:")[0]
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(re.findall(r": docs/(\S+\.md)$", navigation, re.MULTILINE)) == sorted(pages)
    assert [page for page in pages if not (site / page).with_suffix(".html").exists()] == []


def test_what_pages_link_to_is_on_the_site(site: Path) -> None:
    """From a page to a file in another folder of the repository, as the repository has it."""
    for page, link in (("quickstart.md", "docker/install.sh"), ("how-it-works.md", "pictures/page.svg")):
        assert f"{link})" in (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert f'"{link}"' in (site / page).with_suffix(".html").read_text(encoding="utf-8")
        source = ROOT / link if (ROOT / link).exists() else ROOT / "docs" / link
        assert (site / link).read_bytes() == source.read_bytes()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*", page.read_text(encoding="utf-8"))
        assert len(loaded) > 3
        assert [tag for tag in loaded if "//" in tag] == [], page


def test_what_is_wrong_is_an_error(tmp_path: Path) -> None:
    """A broken link, one to a heading that does not exist, and a page that the navigation lacks."""
    copy = tmp_path / "copy"
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for path in (*ROOT.glob("*.md"), ROOT / CONFIGURATION):
        shutil.copy(path, copy)
    with (copy / "docs" / "choosing.md").open("a") as page:
        page.write("\n[1](no-such-page.md) [2](formats.md#no-such-heading)\n")
    (copy / "docs" / "new.md").write_text("# A new page\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    for wrong in ("docs/new.md", "no-such-page.md", "#no-such-heading", "Aborted with 3 warnings"):
        assert wrong in done.stdout + done.stderr

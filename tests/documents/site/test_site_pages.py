"""The documents' site in a browser: headings and pictures are shown, nothing is too wide, and dark is dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proof.site import main as site
from proof.site.browser import DARK, DESKTOP, LIGHT, NONE, PHONE, Browser, BrowserError, chromium
from proof.site.main import PAGES, Seen, build, main, see, see_all, served

pytest.importorskip("material", reason="mkdocs-material is not installed: python3 scripts/bootstrap.py brings it")
pytestmark = pytest.mark.wide

GOOD = Seen("a.html", DESKTOP, LIGHT, "A page", DESKTOP, [("x.svg", 10, 5)], "white", [])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip(NONE)
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    build(made)
    return made


def test_four_pages(browser: Browser, folder: Path) -> None:
    with served(folder) as address:
        seen = [*see_all(browser, address, PAGES, None)]
    assert [problem for page in seen for problem in page.problems()] == []
    assert len(seen) == 4 * len(PAGES)
    assert {page.heading for page in seen} == {"Quickstart", "Choosing a format", "How it works", "Quality"}
    assert {len(page.pictures) > 0 for page in seen if page.page != "quickstart.html"} == {True}
    grounds = {scheme: {page.ground for page in seen if page.scheme == scheme} for scheme in (LIGHT, DARK)}
    assert len(grounds[LIGHT]) == len(grounds[DARK]) == 1
    assert grounds[LIGHT] != grounds[DARK]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<h1", "<h2", "it has no heading"),
        ("pictures/page.svg", "pictures/none.svg", "the picture pictures/none.svg is not shown"),
        ("<h1", '<div style="width: 500px">wide</div><h1', "it is 5"),
        ("</body>", "<script>console.error('broken')</script></body>", "the console says: broken"),
    ],
)
def test_what_is_wrong_is_seen(browser: Browser, folder: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    copy = tmp_path / "site"
    shutil.copytree(folder, copy)
    page = copy / "how-it-works.html"
    text = page.read_text(encoding="utf-8")
    assert old in text
    page.write_text(text.replace(old, new), encoding="utf-8")
    with served(copy) as address:
        problems = see(browser, address, page.name, PHONE, DARK).problems()
    assert problems
    assert any(f"how-it-works.html, {PHONE} pixels, {DARK}: {said}" in problem for problem in problems)


def test_the_command_says_what_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [GOOD]
    monkeypatch.setattr(site, "Browser", lambda: served(tmp_path))  # any context
    monkeypatch.setattr(site, "build", lambda folder: None)
    monkeypatch.setattr(site, "see_all", lambda *_: found)
    assert main(["--out", str(tmp_path)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    found.append(replace(GOOD, heading=None))
    assert main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "a.html, 1280 pixels, light: it has no heading\n"


def test_without_a_browser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as without:
        without.setenv("PATH", "")
        assert main([]) == 1
    assert "install Chromium" in capsys.readouterr().err
    with pytest.raises(BrowserError, match="exited before it answered"), Browser("/bin/false"):
        pass

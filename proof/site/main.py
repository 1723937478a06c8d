"""Builds the documents' site, and shows some of its pages in a browser: on a desk and on a phone, light and dark.

    python -m proof site                    builds the site, and writes PNG files to build/screens
    python -m proof site --pages models.html,gpu.html --out DIR

It exits with 1 if a page lacks its heading or a picture, is wider than the screen, or if its console reports an error.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from proof.site.browser import DARK, DESKTOP, LIGHT, PHONE, Browser, BrowserError

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("quickstart.html", "choosing.html", "how-it-works.html", "quality.html")
SCHEMES = (LIGHT, DARK)
WIDTHS = (DESKTOP, PHONE)

HEADING = """(() => { const h = document.querySelector('h1'), box = h ? h.getBoundingClientRect() : null;
return box && box.width > 0 && box.height > 0 ? h.firstChild.textContent.trim() : null })()"""
WIDE = "document.documentElement.scrollWidth"
PICTURES = """(async () => { const all = [...document.querySelectorAll('article img')];
await Promise.all(all.map(x => { x.loading = 'eager'; return x.decode().catch(() => 0) }));
return all.map(x => [x.getAttribute('src'), x.naturalWidth, x.getBoundingClientRect().width]) })()"""
GROUND = "getComputedStyle(document.body).backgroundColor"


@dataclass(frozen=True)
class Seen:
    """A page as it was shown."""

    page: str
    width: int
    scheme: str
    heading: str | None
    wide: int
    """The width of what is there; a phone makes its page as wide as that."""
    pictures: Sequence[tuple[str, float, float]]
    """Name, own width, width on the page."""
    ground: str
    complaints: Sequence[str]

    def problems(self) -> list[str]:
        found = [] if self.heading else ["it has no heading"]
        if self.wide > self.width:
            found.append(f"it is {self.wide} pixels wide")
        found += [f"the picture {name} is not shown" for name, own, wide in self.pictures if not (own and wide)]
        found += [f"the console says: {complaint}" for complaint in self.complaints]
        return [f"{self.page}, {self.width} pixels, {self.scheme}: {problem}" for problem in found]


def build(folder: Path) -> None:
    """BrowserError if MkDocs refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BrowserError(f"the site can't be built:\n{done.stderr}")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of this folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def see(browser: Browser, address: str, page: str, width: int, scheme: str) -> Seen:
    browser.show(f"{address}/{page}", width, scheme)
    pictures = [(str(name), own, wide) for name, own, wide in browser.value(PICTURES)]
    heading, wide, ground = map(browser.value, (HEADING, WIDE, GROUND))
    return Seen(page, width, scheme, heading, wide, pictures, ground, [*browser.complaints])


def see_all(browser: Browser, address: str, pages: Sequence[str], out: Path | None) -> Iterator[Seen]:
    for page in pages:
        for width in WIDTHS:
            for scheme in SCHEMES:
                seen = see(browser, address, page, width, scheme)
                if out is not None:
                    name = re.sub(r"\W+", "-", page.removesuffix(".html"))
                    browser.picture(out / f"{name}-{scheme}-{width}.png", whole=True)
                yield seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proof site",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pages", default=",".join(PAGES), metavar="PAGE,...", help="pages of the site")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "screens", metavar="DIR", help="for PNG files")
    options = parser.parse_args(argv)
    problems: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as folder, Browser() as browser:
            build(Path(folder))
            with served(Path(folder)) as address:
                for seen in see_all(browser, address, options.pages.split(","), options.out):
                    problems += seen.problems()
    except BrowserError as error:
        print(f"python -m proof site: {error}", file=sys.stderr)
        return 1
    print(*problems or [f"nothing is wrong; look at the pictures in {options.out}"], sep="\n")
    return int(bool(problems))

"""The page: a heading, how it was made, its contents, and its sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from vllm_kvq.cli.page.made import made
from vllm_kvq.cli.page.tree import Child, Quoting, drawing, element, table
from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture

FILE = "report.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A browser obeys it: nothing is loaded, and no script runs."""
Part = Table | Quoting | Picture | str
"""A table or a picture has its title as its heading; text is a paragraph."""


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    """A sentence on what was measured."""
    command: str
    facts: Sequence[tuple[str, str]]
    """The model, for example. Versions and the machine are added automatically."""
    sections: Sequence[Section]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        path.write_text(self.html(), encoding="utf-8", errors="backslashreplace")
        return path

    def html(self) -> str:
        shown = [section for section in self.sections if section.parts]
        head = element(
            "head",
            {},
            element("meta", {"charset": "utf-8"}),
            element("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
            element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            element("meta", {"name": "color-scheme", "content": "light dark"}),
            element("title", {}, self.title),
            element("style", {}, files(__package__).joinpath("style.css").read_text(encoding="utf-8")),
        )
        line = element("pre", {}, element("code", {}, self.command))
        top = element("header", {}, element("h1", {}, self.title), element("p", {}, self.about), line)
        body = [_section(section, f"s{n}") for n, section in enumerate(shown, 1)]
        parts = [top, _contents(shown), element("main", {}, *body), _made([*self.facts, *made()])]
        root = element("html", {"lang": "en"}, head, element("body", {}, *parts))
        return f"<!doctype html>\n{ElementTree.tostring(root, encoding='unicode', method='html')}\n"


def _section(section: Section, name: str) -> Element:
    parts = [child for n, part in enumerate(section.parts, 1) for child in _part(part, f"{name}-{n}")]
    return element("section", {"aria-labelledby": name}, element("h2", {"id": name}, section.title), *parts)


def _part(part: Part, name: str) -> Iterator[Child]:
    if isinstance(part, str):
        yield element("p", {}, part)
        return
    heading, about = titles(part)
    if heading:
        yield element("h3", {"id": name}, heading)
    if about:
        yield element("p", {"class": "about"}, about)
    yield element("figure", {}, drawing(part, name)) if isinstance(part, Picture) else table(part)


def titles(part: Table | Quoting | Picture) -> tuple[str, str]:
    """A short heading, and what a title says beyond it."""
    title = part.table.title if isinstance(part, Quoting) else part.title
    if isinstance(part, Picture):
        heading, _, about = title.partition("\n")
        return heading, about
    heading, _, about = title.partition(": ")
    return heading.replace("; ", ", "), about


def _contents(sections: Sequence[Section]) -> Element:
    items = []
    for n, section in enumerate(sections, 1):
        titled = [(i, titles(part)[0]) for i, part in enumerate(section.parts, 1) if not isinstance(part, str)]
        inner = [_link(f"s{n}-{i}", title) for i, title in titled if title]
        below = [element("ul", {}, *inner)] if len(inner) > 1 else []
        items.append(_link(f"s{n}", section.title, *below))
    return element("nav", {"aria-label": "Contents"}, element("ol", {}, *items))


def _link(name: str, title: str, *below: Child) -> Element:
    return element("li", {}, element("a", {"href": f"#{name}"}, title), *below)


def _made(facts: Sequence[tuple[str, str]]) -> Element:
    rows = [element("div", {}, element("dt", {}, name), element("dd", {}, value)) for name, value in facts]
    return element("footer", {}, element("h2", {"id": "made"}, "How this page was made"), element("dl", {}, *rows))

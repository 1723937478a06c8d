"""A page's elements. Text enters a page only as text of an element, so whatever a model says is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture

Child = Element | str
Quote = tuple[str, str, str]
"""A text before a token, the token, and the text after it."""


def element(tag: str, attributes: Mapping[str, str] | None = None, *children: Child) -> Element:
    made = Element(tag, dict(attributes or {}))
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


# -- tables -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Quoting:
    """A table with a column of texts in each of which a token is marked."""

    table: Table
    column: int
    quotes: Sequence[Quote] = field(repr=False)


def table(shown: Table | Quoting) -> Element:
    """It scrolls on its own where the page is too narrow for it; a reader without a mouse reaches it with Tab."""
    of = shown if isinstance(shown, Table) else shown.table
    head = element("tr", {}, *(element("th", _cell(of, i, "col"), *_lines(text)) for i, text in enumerate(of.head)))
    rows = [element("tr", {}, *_cells(shown, of, number)) for number in range(len(of.rows))]
    about = {"class": "wide", "tabindex": "0", "role": "region", "aria-label": of.title or "table"}
    return element("div", about, element("table", {}, element("thead", {}, head), element("tbody", {}, *rows)))


def _cells(shown: Table | Quoting, of: Table, number: int) -> Iterator[Element]:
    for i, text in enumerate(of.rows[number]):
        if isinstance(shown, Quoting) and i == shown.column:
            before, token, after = shown.quotes[number]
            yield element("td", {"class": "quote"}, before, element("mark", {}, token), after)
        elif i == 0:
            yield element("th", _cell(of, i, "row"), text)
        else:
            yield element("td", _cell(of, i), *_interval(text))


def _cell(of: Table, column: int, scope: str | None = None) -> dict[str, str]:
    attributes = {"class": "number"} if column >= of.right else {}
    return attributes | ({"scope": scope} if scope else {})


def _lines(text: str) -> list[Child]:
    first, *others = text.split("\n")
    lines: list[Child] = [first]
    for line in others:
        lines += [element("br"), line]
    return lines


def _interval(text: str) -> list[Child]:
    """A figure's interval, which is read after the figure; and a verdict on it."""
    found = re.fullmatch(r"(\S+) (\[[^]]*\])(?: (\w+))?", text)
    if found is None:
        return [text]
    figure, interval, verdict = found.groups()
    said: list[Child] = [" ", element("b", {"class": verdict}, verdict)] if verdict else []
    return [figure, " ", element("span", {"class": "interval"}, interval), *said]


# -- pictures ---------------------------------------------------------------------------------------------------------
LARGEST = 1.3
"""The widest that a picture is shown, relative to its own size."""
_NAMESPACE = re.compile(r"\{[^}]*\}")


def drawing(picture: Picture, name: str) -> Element:
    """The picture as a part of the page. Its names begin with `name`, because a page may have many pictures."""
    root = ElementTree.fromstring(picture.svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _NAMESPACE.sub("", child.tag) in ("metadata", "style"):
                parent.remove(child)
    for part in root.iter():
        part.tag = _NAMESPACE.sub("", part.tag)
        part.attrib = dict(_own(_NAMESPACE.sub("", key), value, name) for key, value in part.attrib.items())
    width = float(root.attrib["width"].removesuffix("pt"))
    for unused in ("version", "width", "height"):
        root.attrib.pop(unused, None)
    root.attrib |= {"role": "img", "aria-label": picture.title, "fill": "currentColor"}
    root.set("style", f"max-width: {LARGEST * width:.0f}pt")
    return root


def _own(key: str, value: str, name: str) -> tuple[str, str]:
    if key == "id":
        return key, f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return key, f"#{name}-{value[1:]}"
    return ("xml:space" if key == "space" else key), value.replace("url(#", f"url(#{name}-")

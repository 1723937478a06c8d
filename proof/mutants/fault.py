"""A fault: a change of one function, and the tests that must fail under it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Stale(Exception):
    """The sources have changed and the fault no longer applies: it must be rewritten."""


@dataclass(frozen=True)
class Fault:
    name: str
    """A few words on what goes wrong."""
    where: str
    """The file, and in Python the function or class: `vllm_kvq/formats/page.py::Page.fields`."""
    before: str
    """Occurs exactly once there, however it is wrapped, and is replaced by `after`."""
    after: str
    tests: str
    """Arguments of pytest."""
    slow: bool = False
    """Takes more than a minute (compiles C++, starts engines): planted only with --all."""

    def __post_init__(self) -> None:
        if self.before == self.after or not self.before.strip() or not self.tests:
            raise ValueError(f"fault {self.name!r} changes nothing, or names no tests")

    @property
    def file(self) -> str:
        return self.where.partition("::")[0]

    def planted(self, root: Path) -> str:
        """The text of the file in the tree at `root`, with the fault in it."""
        before, function, after = self._parts(root)
        return before + function + after

    def function(self, root: Path) -> str:
        """Only the function or class with the fault in it; the file, if the fault names none."""
        return self._parts(root)[1]

    def _parts(self, root: Path) -> tuple[str, str, str]:
        path = root / self.file
        if not path.is_file():
            raise Stale(f"{self.file} does not exist")
        text = path.read_text(encoding="utf-8")
        start, end = self._extent(text)
        found = [match.span() for match in _pattern(self.before).finditer(text, start, end)]
        if len(found) != 1:
            raise Stale(f"{self.where} has the text to replace {len(found)} times")
        ((first, last),) = found
        changed = text[start:first] + self.after + text[last:end]
        if path.suffix == ".py" and not _differ(text[start:end], changed):
            raise Stale(f"{self.where} is the same with the text replaced, or is not Python")
        return text[:start], changed, text[end:]

    def _extent(self, text: str) -> tuple[int, int]:
        if "::" not in self.where:
            return 0, len(text)
        function = self.where.partition("::")[2]
        places = [_place(text, node) for name, node in _definitions(ast.parse(text)) if name == function]
        if len(places) != 1:
            raise Stale(f"{self.where} is defined {len(places)} times")
        return places[0]

    def apply(self, root: Path) -> str:
        """Plant it in the tree at `root`; returns the file's text as it was."""
        changed, path = self.planted(root), root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(changed, encoding="utf-8")
        return text


def _pattern(text: str) -> re.Pattern[str]:
    """The same code, whatever a formatter has done to its lines: space between tokens, a comma before a bracket."""

    def of(token: str) -> str:
        return rf"\b{token}\b" if token.isidentifier() or token.isdigit() else re.escape(token)

    first, *rest = re.findall(r"\w+|[^\w\s]", text)
    return re.compile(of(first) + "".join((r"\s*,?\s*" if t in ")]}" else r"\s*") + of(t) for t in rest))


def _definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, Definition]]:
    """(qualified name, function or class) of each one defined in it, the outer ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield within + child.name, child
            yield from _definitions(child, f"{within}{child.name}.")
        else:
            yield from _definitions(child, within)


def _place(text: str, node: Definition) -> tuple[int, int]:
    """Where it begins, decorators included, and ends."""
    lines = text.splitlines(keepends=True)
    first = min(part.lineno for part in (node, *node.decorator_list))
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def _differ(code: str, changed: str) -> bool:
    """Whether they differ to Python, which parses both: in more than brackets and comments."""
    head = "if True:\n" if code[0].isspace() else ""
    try:
        return ast.dump(ast.parse(head + code)) != ast.dump(ast.parse(head + changed))
    except SyntaxError:
        return False

"""The record of the faults that were caught: the next run plants only what has changed since.

A line is a fault's name, after a hash of the function with the fault in it (in C++: of the file), and of the tests and
their modules: once one of these changes, the fault is planted again. Of Python only what runs counts, not its comments
and docstrings. What else the tests use is not in the hash, which is what --afresh is for.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import textwrap
import threading
from collections.abc import Iterable
from pathlib import Path

from proof.mutants.fault import Fault, Stale

RECORD = Path(__file__).with_name("caught.txt")
DIGITS = 16


class Kept:
    def __init__(self, path: Path, root: Path, faults: Iterable[Fault]) -> None:
        """`root`: the checkout whose files count. `faults`: what is no longer among them is forgotten."""
        self.path, self.root = path, root
        self._lock = threading.Lock()
        self._now: dict[str, str] = {}
        """Each fault's mark when it was asked for: the checkout may change while its tests run."""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
        known = {fault.name for fault in faults}
        marks = {name: mark for mark, _, name in (line.partition(" ") for line in lines)}
        self._marks = {name: mark for name, mark in marks.items() if name in known}

    def __contains__(self, fault: Fault) -> bool:
        try:
            self._now[fault.name] = self._mark(fault)
        except Stale:
            return False
        return self._marks.get(fault.name) == self._now[fault.name]

    def keep(self, fault: Fault) -> None:
        with self._lock:
            self._marks[fault.name] = self._now.get(fault.name) or self._mark(fault)
            lines = [f"{mark} {name}\n" for name, mark in sorted(self._marks.items())]
            (new := self.path.with_name(f".{self.path.name}")).write_text("".join(lines), encoding="utf-8")
            new.replace(self.path)

    def forget(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._marks.pop(fault.name, None)

    def _mark(self, fault: Fault) -> str:
        planted = what_runs(fault.file, fault.function(self.root))
        digest = hashlib.sha256(repr((fault.file, planted, fault.tests)).encode())
        for module in (self.root / word.partition("::")[0] for word in fault.tests.split()):
            if module.is_file():
                digest.update(what_runs(module.name, module.read_text(encoding="utf-8")).encode())
        return digest.hexdigest()[:DIGITS]


@functools.lru_cache(maxsize=256)
def what_runs(name: str, text: str) -> str:
    """Python without its comments and docstrings; anything else as it is."""
    if not name.endswith(".py"):
        return text
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

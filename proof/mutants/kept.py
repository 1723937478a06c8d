"""The record of the faults that were caught: the next run plants only what has changed since.

A line is a fault's name, after a hash of its file with the fault in it, and of the tests and their modules: once one of
these changes, the fault is planted again. What else the tests use is not in it, which is what --afresh is for.
"""

from __future__ import annotations

import hashlib
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
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
        known = {fault.name for fault in faults}
        marks = {name: mark for mark, _, name in (line.partition(" ") for line in lines)}
        self._marks = {name: mark for name, mark in marks.items() if name in known}

    def __contains__(self, fault: Fault) -> bool:
        try:
            return self._marks.get(fault.name) == self._mark(fault)
        except Stale:
            return False

    def keep(self, fault: Fault) -> None:
        with self._lock:
            self._marks[fault.name] = self._mark(fault)
            lines = [f"{mark} {name}\n" for name, mark in sorted(self._marks.items())]
            (new := self.path.with_name(f".{self.path.name}")).write_text("".join(lines), encoding="utf-8")
            new.replace(self.path)

    def forget(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._marks.pop(fault.name, None)

    def _mark(self, fault: Fault) -> str:
        digest = hashlib.sha256(repr((fault.file, fault.planted(self.root), fault.tests)).encode())
        for module in (self.root / word.partition("::")[0] for word in fault.tests.split()):
            if module.is_file():
                digest.update(module.read_bytes())
        return digest.hexdigest()[:DIGITS]

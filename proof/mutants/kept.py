"""Faults that were caught, in a file, so that a run of hours may be stopped and goes on later.

A line is a hash of the file with the fault in it, and of the tests and their modules: once one of these changes, the
fault is planted again.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from proof.mutants.fault import Fault, Stale


class Kept:
    def __init__(self, path: Path, root: Path) -> None:
        """`root`: the checkout whose files count."""
        self.path, self.root = path, root
        self._lock = threading.Lock()
        self._lines = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()

    def __contains__(self, fault: Fault) -> bool:
        try:
            return self._line(fault) in self._lines
        except Stale:
            return False

    def keep(self, fault: Fault) -> None:
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(fault) + "\n")

    def _line(self, fault: Fault) -> str:
        digest = hashlib.sha256(repr((fault.file, fault.planted(self.root), fault.tests)).encode())
        for module in (self.root / word.partition("::")[0] for word in fault.tests.split()):
            if module.is_file():
                digest.update(module.read_bytes())
        return digest.hexdigest()

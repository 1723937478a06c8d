"""Faults that were caught, in a file, so that a run of hours may be stopped and goes on later.

A line is a hash of a fault, of the file that it is planted into, and of the modules of its tests: once one of these
changes, the fault is planted again.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import astuple
from pathlib import Path

from proof.mutants.fault import Fault


class Kept:
    def __init__(self, path: Path, root: Path) -> None:
        """`root`: the checkout whose files count."""
        self.path, self.root = path, root
        self._lock = threading.Lock()
        self._lines = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()

    def __contains__(self, fault: Fault) -> bool:
        return self._line(fault) in self._lines

    def keep(self, fault: Fault) -> None:
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(fault) + "\n")

    def _line(self, fault: Fault) -> str:
        digest = hashlib.sha256(repr(astuple(fault)).encode())
        words = (word.partition("::")[0] for word in fault.tests.split())
        for path in (self.root / name for name in (fault.file, *words)):
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()

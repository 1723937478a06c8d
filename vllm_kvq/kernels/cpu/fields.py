"""The library's structs of plain numbers, which Python fills by the names that the library exports."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fields:
    """One of the library's structs: its fields in order, and their types as letters of `struct`."""

    names: tuple[str, ...]
    letters: str

    @classmethod
    def parse(cls, text: str) -> Fields:
        names, letters = zip(*(part.split(":") for part in text.split()), strict=True)
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(f"the library names {', '.join(repeated)} more than once")
        return cls(names, "".join(letters))

    def check(self, given: Iterable[str], what: str) -> None:
        """Raises ValueError if the names are not exactly the library's."""
        unknown, missing = sorted(set(given) - {*self.names}), sorted({*self.names} - set(given))
        if unknown:
            raise ValueError(f"the library's {what} has no {', '.join(unknown)}")
        if missing:
            raise ValueError(f"the library's {what} also has {', '.join(missing)}")

    def fill(self, values: Mapping[str, float], what: str) -> bytes:
        self.check(values, what)
        return struct.pack(f"={self.letters}", *(values[name] for name in self.names))

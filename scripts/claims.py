"""Holds README's numbers to docs/claims.md, and those rows to the results that were recorded.

    python scripts/claims.py    # silent and exit status 0, or one line for each number that nothing backs

docs/claims.md has two tables. Each row of the first quotes README and names where the number was recorded: a CSV file
below docs/, which of its rows (`column=value`, several values joined by `/`), and the column. Bits are computed again.
README may round. The second table quotes numbers that are settings, sizes or versions, not results.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+(?![\w]|\.\d)")
"""A number that stands by itself: not the 2 of `squat2`, nor a version."""
RANGE = re.compile(r"\s+to\s+")


@dataclass(frozen=True)
class Claim:
    """A row of the first table."""

    quote: str
    """README's own words, with exactly one number or one range in them, marked by `**`."""
    source: str
    command: str
    machine: str
    date: str

    def __post_init__(self) -> None:
        if len(re.findall(r"\*\*(.+?)\*\*", self.quote)) != 1:
            raise ValueError(f"mark the one number of this row by two stars on each side: {self.quote!r}")
        if not (self.command and self.machine and re.fullmatch(r"20\d\d-\d\d-\d\d", self.date)):
            raise ValueError(f"a row needs its command, its machine and a date like 2026-11-24: {self.quote!r}")

    @property
    def said(self) -> str:
        return self.quote.replace("**", "")

    @property
    def numbers(self) -> tuple[str, ...]:
        """One, or the least and the greatest of a range, as README writes them."""
        marked = re.search(r"\*\*(.+?)\*\*", self.quote)
        assert marked is not None
        return tuple(RANGE.split(marked[1].replace(",", "")))

    def problem(self) -> str | None:
        found = recorded(self.source)
        wanted = [min(found), max(found)] if len(self.numbers) == 2 else [*found]
        if len(self.numbers) != len(wanted):
            return f"{self.said!r}: {len(wanted)} recorded numbers, README has {len(self.numbers)}"
        for number, value in zip(self.numbers, wanted, strict=True):
            if not rounds_to(value, number):
                return f"{self.said!r}: README says {number}, recorded is {value:.6g}"
        return None


def rounds_to(value: float, written: str) -> bool:
    """Whether `written` is `value` with as many digits after the point as `written` has."""
    digits = len(written.partition(".")[2])
    return abs(float(written) - value) <= 0.5000001 * 10**-digits


def recorded(source: str) -> list[float]:
    """The numbers that a row points at: `FILE column=value ... -> column`, or `bits FORMAT head size page`; `A over B`
    is the ratio of two."""
    if " over " in source:
        (first,), (second,) = map(recorded, source.split(" over "))
        return [first / second]
    if source.startswith("bits "):
        from vllm_kvq import FORMATS

        _, name, head, page = source.split()
        return [FORMATS[name].bits_per_element(int(head), int(page))]
    where, arrow, column = source.partition(" -> ")
    if not arrow:
        raise ValueError(f"not a source: {source!r}; write FILE column=value ... -> column")
    file, *conditions = where.split()
    chosen = [tuple(condition.split("=", 1)) for condition in conditions]
    with (ROOT / "docs" / file).open(encoding="utf-8") as lines:
        rows = [r for r in csv.DictReader(lines) if all(r[name] in value.split("/") for name, value in chosen)]
    if not rows:
        raise ValueError(f"no row of {file} is {where.removeprefix(file).strip()!r}")
    return [float(row[column.strip()]) for row in rows]


# -- the two documents ------------------------------------------------------------------------------------------------
def tables(page: str) -> tuple[list[Claim], list[str]]:
    """The claims, and the quotes of what is not a result."""
    results, settings = page.split("## Settings", 1)
    claims = []
    for cells in _rows(results):
        quote, source, command, machine, date = cells
        claims.append(Claim(quote, source.strip("`"), command.strip("`"), machine, date))
    return claims, [cells[0] for cells in _rows(settings)]


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not re.fullmatch(r"[-| ]+", line) and cells[0] not in ("README says", "README"):
            yield cells


def prose(readme: str) -> str:
    """What a reader reads: no code blocks, link targets, bold type or table bars; lines joined."""
    text = re.sub(r"```.*?```|(?m:^    [^\n]*$)", " ", readme, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.replace("**", "").replace("|", " ").split())


def problems(readme: str, page: str) -> list[str]:
    claims, settings = tables(page)
    text = prose(readme)
    found = [f"README does not say {quote!r}" for quote in (*(c.said for c in claims), *settings) if quote not in text]
    found += [problem for claim in claims if (problem := claim.problem())]
    covered = [span for quote in (*(c.said for c in claims), *settings) for span in _spans(text, quote)]
    for number in NUMBER.finditer(text):
        if not any(begin <= number.start() and number.end() <= end for begin, end in covered):
            around = text[max(0, number.start() - 40) : number.end() + 30]
            found.append(f"no row of docs/claims.md quotes {number[0]!r} in {around!r}")
    return found


def _spans(text: str, quote: str) -> Iterator[tuple[int, int]]:
    for match in re.finditer(re.escape(quote), text):
        yield match.span()


if __name__ == "__main__":
    wrong = problems(
        (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    )
    print("\n".join(wrong), end="\n" * bool(wrong))
    sys.exit(bool(wrong))

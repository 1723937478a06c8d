"""docs/formats.md says what the code does: its tables are compared with their sources."""

import re
from pathlib import Path

import pytest

from vllm_kvq.eval import error_table
from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.peers import PEERS
from vllm_kvq.formats.table import declared_options, key_codecs, value_codecs

DOC = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = re.split(r"^## ", DOC, flags=re.M)
    body = next(s for s in section if s.startswith(heading + "\n"))
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[c.strip().strip("`") for c in line.strip("|").split("|")] for line in lines[2:]]


def test_options_table() -> None:
    want = [[o.name, o.help, ", ".join(codecs) or "all", o.allowed] for o, codecs in declared_options()]
    printed = "\n".join(f"| `{n}` | {h} | {c} | {a} |" for n, h, c, a in want)
    assert rows("Options") == want, f"the table should be\n{printed}"


def test_codecs_table() -> None:
    halves = (("keys", key_codecs()), ("values", value_codecs()))
    want = [[half, codec.name, codec.title] for half, codecs in halves for codec in codecs.values()]
    printed = "\n".join(f"| {h} | `{n}` | {t} |" for h, n, t in want)
    assert rows("Codecs") == want, f"the table should be\n{printed}"


def test_bits_table() -> None:
    public = {n: f for n, f in FORMATS.items() if f.public}
    want = [
        [name, *(f"{f.bits_per_element(d, n):.3f}" for d in (64, 128) for n in (64, 128))]
        + [f"{f.capacity_factor(d, 64):.2f}" for d in (64, 128)]
        for name, f in public.items()
    ]
    printed = "\n".join("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in want)
    assert rows("What a format costs") == want, f"the table should be\n{printed}"


def test_comparison_table() -> None:
    want = [
        [name, fmt.title, *(f"{fmt.bits_per_element(d, 128):.3f}" for d in (64, 128))]
        for name, fmt in ((name, FORMATS[name]) for name in PEERS)
    ]
    printed = "\n".join("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in want)
    assert rows("Formats for comparison") == want, f"the table should be\n{printed}"


def test_padding_table() -> None:
    want = [
        [name, *(f"{FORMATS[name].bits_per_element(d, 64):.2f}" for d in (80, 96, 112, 128))]
        for name in (n for n, f in FORMATS.items() if f.public and f.keys.name != "kivi")  # squat2_pre and squat4 cost the same
    ]
    printed = "\n".join("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in want)
    assert rows("Head sizes") == want, f"the table should be\n{printed}"


def test_error_table() -> None:
    """Printed by `python -m vllm_kvq.eval.error_table`; the last place may differ between machines."""
    got = rows("Score errors")
    assert [r[0] for r in got] == [label for label, _, _ in error_table.ROWS]
    for row, (_, name, options) in zip(got, error_table.ROWS, strict=True):
        assert float(row[1]) == pytest.approx(error_table.key_bits(name, options, 128), abs=0.005)
        for cell, (d, rope) in zip(row[2:], error_table.CASES, strict=True):
            assert float(cell) == pytest.approx(error_table.error(name, options, d, rope), rel=0.03), row


def test_symmetric_share() -> None:
    said = re.search(r"symmetric mode wins ([\d.]+) % of the\s+key groups", DOC)
    assert said
    assert float(said[1]) == pytest.approx(100 * error_table.symmetric_share(128)[0], abs=0.1)

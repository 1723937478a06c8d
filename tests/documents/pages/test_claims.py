"""README's numbers are those of docs/claims.md, and these are what was recorded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_number_in_readme_is_backed(claims: ModuleType) -> None:
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/claims.md"))
    assert claims.problems(readme, page) == []


README = "Decoding is 3.1 times as fast, {x} at head size 128.\n\n    a code block with 77\n\nSee [5](docs/99.md)."
PAGE = """\
| README says | recorded | command | machine | date |
|---|---|---|---|---|
| {quote} | `{source}` | `vllm-kvq formats` | any | 2026-11-24 |

## Settings

| README | what it is |
|---|---|
| at head size 128 | a setting |
| [5] | a page |
| Decoding is 3.1 times | a setting here |
"""


def page(quote: str, source: str) -> str:
    return PAGE.format(quote=quote, source=source)


BITS = "bits squat4 128 128"


@pytest.mark.parametrize(
    ("said", "quote", "source", "wrong"),
    [
        ("with 5.03 bits", "with **5.03** bits", BITS, None),
        ("with 5.0 bits", "with **5.0** bits", BITS, None),
        ("with 5.04 bits", "with **5.04** bits", BITS, "README says 5.04"),
        ("with 5.03 bits", "with **5.03** bit!", BITS, "README does not say"),
        ("with 5.03 bits or 3", "with **5.03** bits", BITS, "no row of docs/claims.md quotes '3'"),
        ("1.36 to 1.60 times", "**1.36 to 1.60** times", "{csv} a=1/2 -> x", None),
        ("1.36 to 1.70 times", "**1.36 to 1.70** times", "{csv} a=1/2 -> x", "README says 1.70, recorded is 1.6"),
        ("1.36 times", "**1.36** times", "{csv} a=1/2 -> x", "2 recorded numbers"),
        ("5.63 times", "**5.63** times", "{csv} a=3 -> x over {csv} a=2 -> x", None),
        ("0.18 times", "**0.18** times", "{csv} a=3 -> x over {csv} a=2 -> x", "README says 0.18"),
    ],
)
def test_what_it_notices(
    said: str, quote: str, source: str, wrong: str | None, claims: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "made.csv").write_text("a,x\n1,1.3571\n2,1.6\n3,9\n")
    found = claims.problems(README.format(x=said), page(quote, source.format(csv=tmp_path / "made.csv")))
    if wrong is None:
        assert found == []
    else:
        assert len([problem for problem in found if wrong in problem]) == 1


def test_a_row_is_complete(claims: ModuleType) -> None:
    with pytest.raises(ValueError, match="mark the one number"):
        claims.Claim("5 bits", BITS, "c", "m", "2026-11-24")
    with pytest.raises(ValueError, match="a date like"):
        claims.Claim("**5** bits", BITS, "c", "m", "yesterday")
    with pytest.raises(ValueError, match="no row of"):
        claims.recorded("results/cpu-attention.csv kernel=nothing -> x_bf16")

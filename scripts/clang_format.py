#!/usr/bin/env python3
"""Rewrite csrc as .clang-format says, or check that it is so: make format, make lint.

.venv/bin/python scripts/clang_format.py [--check]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".h", ".cpp", ".cu")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file would change")
    check: bool = parser.parse_args(argv).check
    sources = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in SOURCES)
    files = sorted(str(path) for path in sources)
    how = ["--dry-run", "-Werror"] if check else ["-i"]
    # in the folder of this Python: the environment that it was installed into
    return subprocess.run([str(Path(sys.executable).parent / "clang-format"), *how, *files], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

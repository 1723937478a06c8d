"""The groups of tests that a release has to pass, and how one of them is run in its environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from proof.admit.release import ROOT

WORKS = "tests/models/test_works.py"
KINDS = ("Llama", "Gemma-3", "Llama 4", "Gemma-3n", "Nemotron-H", "gpt-oss")
"""A model with nothing but full attention, with windows, chunks, shared caches, states and learned sinks."""


@dataclass(frozen=True)
class Group:
    name: str
    what: str
    tests: tuple[str, ...]
    """Arguments of pytest."""


GROUPS = (
    Group(
        "patches",
        "each is installed once and takes effect in an engine",
        (
            "tests/engine/test_patches_in_effect.py",
            "tests/planning/test_compat.py::test_the_removal_of_a_hook_is_one_sentence",
        ),
    ),
    Group(
        "traces",
        "`lossless` gives plain vLLM's tokens on the oracle's traces, also with seeds and drafts",
        (
            "tests/engine/oracle/test_lossless.py",
            "tests/engine/oracle/test_seeds.py",
            "tests/engine/oracle/test_speculation.py::test_lossless_equals_plain_vllm",
        ),
    ),
    Group(
        "models",
        "`lossless` and a lossy format, a model of each kind of layers",
        tuple(
            f"{WORKS}::{test}[{kind}]" for test in ("test_lossless_equals_plain_vllm", "test_lossy") for kind in KINDS
        ),
    ),
    Group(
        "connectors",
        "packed pages in the host's memory; which connectors there are",
        ("tests/models/pool/test_offload.py", "-k", "every_connector or reasons or engines_with_other"),
    ),
    Group(
        "refusals",
        "what can't be served is refused in one sentence, before weights load",
        ("tests/planning/plan/test_refusals.py", "tests/models/test_refused.py"),
    ),
)
"""Without --all: up to an hour on two cores."""
ALL = (
    Group("engine", "all tests with engines", ("tests/engine", "tests/planning", "tests/servers")),
    Group("models", "all tests of models", ("tests/models",)),
    Group("processes", "all tests with several processes", ("tests/processes",)),
)
"""With --all: hours."""


EXCEPTION = re.compile(r"([a-z_]\w*\.)*[A-Z]\w*(Error|Exception|Failed|Exit|Interrupt|Warning)(: |$)")
"""As in the last line of a traceback."""


@dataclass(frozen=True)
class Failure:
    test: str
    text: str
    """What pytest reports of it, tracebacks and captured output included."""

    @property
    def reason(self) -> str:
        """The last exception of the test's traceback, which is its engine's if that failed; else the first line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
        exceptions = [line for line in errors if EXCEPTION.match(line)]
        return without_paths((exceptions[-1:] or errors or lines or ["nothing was said"])[0])[:200]


def without_paths(text: str) -> str:
    """Only the last part of each absolute path: the rest depends on the machine."""
    return re.sub(r"(?<![\w.:/])(?:/[\w.+-]+)+/(?=[\w.+-])", "", text)


@dataclass(frozen=True)
class Outcome:
    group: Group
    passed: int
    skipped: int
    failures: tuple[Failure, ...]
    seconds: float
    crash: str = ""
    """The end of what pytest said if it could not run."""

    @property
    def good(self) -> bool:
        return not self.failures and not self.crash and self.passed > 0


def run(group: Group, variables: Mapping[str, str]) -> Outcome:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvq-admit-") as folder:
        found = Path(folder) / "found.xml"
        report = ("--tb=short", f"--junitxml={found}", "-o", "junit_logging=all", "-o", "junit_family=xunit1")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *report, *group.tests]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        passed, skipped, failures = read(found) if found.exists() else (0, 0, ())
    crash = done.stdout[-1500:] if done.returncode != (1 if failures else 0) else ""
    return Outcome(group, passed, skipped, failures, time.monotonic() - begun, crash)


def read(file: Path) -> tuple[int, int, tuple[Failure, ...]]:
    """Passed, skipped and failed tests of a JUnit file."""
    failures, skipped, passed = [], 0, 0
    for case in ElementTree.parse(file).iter("testcase"):
        wrong = [*case.findall("failure"), *case.findall("error")]
        if wrong:
            said = [*wrong, *case.findall("system-out"), *case.findall("system-err")]
            text = "\n".join(part for e in said for part in (e.text or e.get("message"),) if part)
            name = case.get("name", "")
            failures.append(Failure(f"{case.get('file') or case.get('classname')}::{name}", text))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(failures)


def named(names: Sequence[str]) -> tuple[Group, ...]:
    return tuple(group for group in GROUPS if group.name in names)

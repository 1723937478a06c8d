"""Plants faults in a copy of the checkout, one at a time, and runs the tests that must catch each.

    python -m proof mutants                    the cheap ones, minutes
    python -m proof mutants --all              with those that compile C++ or start engines, hours
    python -m proof mutants --only "rescale"   those with this text in their name
    python -m proof mutants --all --afresh     those that were caught before, too
    python -m proof mutants --report FILE      the findings go to FILE, a page of docs/results

A fault that was caught is recorded (caught.txt) and not planted again until it, its function (in C++: its file) or its
tests change, so a run that was stopped resumes where it left off.

Each set of tests must pass without a fault first. Exits with 1 if a fault survives, no longer applies, or its tests
fail without it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import Queue

from proof.mutants.catalog import FAULTS
from proof.mutants.fault import Fault, Stale
from proof.mutants.kept import RECORD, Kept
from proof.mutants.pytests import CRASHED, FAILED, PASSED, Pytests
from vllm_kvq.kernels.cpu.processor import processor_name

ROOT = Path(__file__).resolve().parents[2]
STOPPED = 130
"""The exit status after Ctrl-C, as a shell has it."""

Pytest = Callable[[Path, str], int]


def copy_checkout(target: Path) -> None:
    """The files that git knows, as they are now, and the kernels that are built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        source = ROOT / name
        if not name or not (source.is_symlink() or source.is_file()):
            continue
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place, follow_symlinks=False)
    built = ROOT / "vllm_kvq" / "_build"
    if built.is_dir():
        shutil.copytree(built, target / "vllm_kvq" / "_build")
    compile_modules(target)


def compile_modules(root: Path) -> None:
    """Once for all tests. A .pyc is valid by its source's hash: a fault may leave its size and time as they were."""
    for package in ("vllm_kvq", "proof"):
        compileall.compile_dir(root / package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


@dataclass
class Outcome:
    caught: list[str] = field(default_factory=list)
    survived: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    """Faults that no longer apply, and tests that do not pass without a fault or were not run."""
    noticed_in: Counter[str] = field(default_factory=Counter)
    """Faults caught, by the folder in which they were planted."""

    @property
    def status(self) -> int:
        return 1 if self.survived or self.unusable or not self.caught else 0

    def line(self) -> str:
        return f"{len(self.caught)} caught, {len(self.survived)} survived, {len(self.unusable)} unusable"


def judge(root: Path, fault: Fault, pytest: Pytest) -> str:
    """One fault: "caught", "survived", or why it proves nothing."""
    try:
        text = fault.apply(root)
    except Stale as stale:
        return f"no longer applies: {stale}"
    try:
        status = pytest(root, fault.tests)
    finally:
        (root / fault.file).write_text(text, encoding="utf-8")
    if status in (PASSED, FAILED, CRASHED):
        return "survived" if status == PASSED else "caught"
    return f"pytest exited with status {status}: nothing was tested"


def plant(
    faults: Iterable[Fault],
    roots: list[Path],
    pytest: Pytest,
    say: Callable[[str], None],
    stop: Callable[[], None] = lambda: None,
    kept: Kept | None = None,
) -> Outcome:
    """Each fault on its own in one of the trees, one at a time per tree: those with the same tests one after the other,
    once these tests have passed without any. `stop` stops all that are running."""
    outcome, together, lock = Outcome(), defaultdict[str, list[Fault]](list), threading.Lock()
    free: Queue[Path] = Queue()
    for root in roots:
        free.put(root)

    def found(fault: Fault, verdict: str) -> None:
        kind = verdict if verdict in ("caught", "survived") else "unusable"
        with lock:
            getattr(outcome, kind).append(fault.name)
            outcome.noticed_in[folder_of(fault)] += kind == "caught"
            say(f"{kind:9} {fault.name} ({fault.file})" + (f": {verdict}" if kind == "unusable" else ""))

    def in_a_tree(tests: str) -> None:
        root = free.get()
        try:
            if pytest(root, tests) != PASSED:
                with lock:
                    outcome.unusable.append(tests)
                    say(f"{'unusable':9} without any fault these tests do not pass: {tests}")
                return
            for fault in together[tests]:
                found(fault, verdict := judge(root, fault, pytest))
                if kept is not None and verdict == "caught":
                    kept.keep(fault)
        finally:
            free.put(root)

    for fault in faults:
        if kept is not None and fault in kept:
            found(fault, "caught")
        else:
            together[fault.tests].append(fault)
    with ThreadPoolExecutor(len(roots)) as pool:
        running = [pool.submit(in_a_tree, tests) for tests in together]
        try:
            for done in as_completed(running):
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()
            raise
    return outcome


def folder_of(fault: Fault) -> str:
    """The folder in which it is planted, at most two deep."""
    return "/".join(Path(fault.file).parent.parts[:2]) or "."


def page(chosen: Sequence[Fault], outcome: Outcome, found: str) -> str:
    everything = any(fault.slow for fault in chosen)
    left_out = "" if everything else "\nThose that compile C++ or start engines, a minute and more each, were left out."
    planted = Counter(map(folder_of, chosen))
    rows = [f"{'planted in':24} {'faults':>6} {'caught':>6}"]
    rows += [f"{folder:24} {planted[folder]:6} {outcome.noticed_in[folder]:6}" for folder in sorted(planted)]
    missed = [f"* survived: {name}" for name in outcome.survived] + [f"* unusable: {name}" for name in outcome.unusable]
    return f"""# Planted faults

Each fault of `proof/mutants` was planted on its own in a copy of the checkout, where the tests that must notice it ran;
the same tests had passed without it ([how it is tested](../testing.md)).{left_out}

    python -m proof mutants{" --all" * everything}

{found}
on {processor_name()}.

```text
{chr(10).join(rows)}
```
{chr(10).join(["", *missed, ""]) if missed else ""}"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="include slow faults")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this text in their name or file")
    text = "concurrent copies (default: the number of cores)"
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help=text)
    parser.add_argument("--afresh", action="store_true", help="also replant faults already caught")
    parser.add_argument(
        "--kept", type=Path, default=RECORD, metavar="FILE", help="the record (proof/mutants/caught.txt)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for the findings; not with --only")
    options = parser.parse_args(argv)
    if options.report and options.only:
        parser.error("--report is for all faults, without --only")
    chosen = [f for f in FAULTS if (options.all or not f.slow) and options.only in f"{f.name} {f.file}"]
    chosen.sort(key=lambda fault: fault.slow)  # a run that is stopped has found most by then
    if not chosen or options.jobs < 1:
        parser.error("no fault is chosen" if not chosen else "--jobs is at least 1")
    kept = Kept(options.kept, ROOT, FAULTS)
    if options.afresh:
        kept.forget(chosen)
    before_this_run = sum(fault in kept for fault in chosen)
    start = time.monotonic()
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with tempfile.TemporaryDirectory(prefix="kvq-mutants-") as folder, Pytests(Path(folder)) as pytests:
            roots = [Path(folder) / str(i) for i in range(min(options.jobs, len(chosen)))]
            for root in roots:
                copy_checkout(root)
            outcome = plant(chosen, roots, pytests, lambda line: print(line, flush=True), pytests.stop, kept)
    except KeyboardInterrupt:
        print("stopped; the copies are removed", file=sys.stderr)
        return STOPPED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    found = f"{outcome.line()} of {len(chosen)} faults, {(time.monotonic() - start) / 60:.0f} minutes"
    if before_this_run:
        found += f" for those that were not caught in earlier runs ({before_this_run})"
    print(found)
    if options.report:
        options.report.write_text(page(chosen, outcome, found), encoding="utf-8")
    return outcome.status


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt

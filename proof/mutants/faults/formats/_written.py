"""How faults in vllm_kvq/formats are written down: files by their names only, wherever they lie below it."""

from __future__ import annotations

from pathlib import Path

from proof.mutants.fault import Fault

ROOT = Path(__file__).resolve().parents[4]
HOME = "vllm_kvq/formats"
TESTS = "tests/formats"
PAPERS = f"{TESTS}/methods/test_papers.py"


def fault(name: str, module: str, before: str, after: str, tests: str) -> Fault:
    """`module`: its name, and a function. `tests`: of tests/formats, or of test_papers.py where it is an option."""
    file, *function = module.split("::")
    chosen, space, options = tests.partition(" ")
    where = f"{PAPERS} {tests}" if tests.startswith("-k") else _found(TESTS, f"test_{chosen}") + space + options
    return Fault(name, "::".join((_found(HOME, f"{file}.py"), *function)), before, after, where)


def _found(folder: str, name: str) -> str:
    """The one file of that name below the folder."""
    (found,) = (ROOT / folder).rglob(name)
    return found.relative_to(ROOT).as_posix()

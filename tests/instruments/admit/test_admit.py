"""`python -m proof admit`: what it says of a made-up vLLM, of tests that fail, and of releases that do not exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proof.admit import blame, groups, main, names, release
from proof.admit.report import Report, need_lines, output_of
from vllm_kvq.integration.patches.names import ADMIT, SUPPORTED
from vllm_kvq.integration.patches.patch import Patch
from vllm_kvq.integration.patches.registry import PATCHES
from vllm_kvq.integration.patches.served import seeds, warmup, zeroing
from vllm_kvq.integration.patches.settings import SETTINGS

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "docs" / "results").glob("admit-*.md"))
SEED_FRAMES = """
vllm_kvq/integration/worker/backend.py:30: in forward
    step()
/home/somebody/vllm_kvq/integration/patches/served/seeds.py:28: in _sample
    output = sample(self, *args, **kwargs)
E   AttributeError: no discard_request_mask
"""
ZERO_FRAMES = """(Worker pid=7)   File "/vllm_kvq/integration/patches/served/zeroing.py", line 27, in _zero_block_ids
(EngineCore pid=7)     zero(self, block_ids)
"""


# -- which patch broke a test -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SEED_FRAMES, [seeds.SEEDS.what]),
        (ZERO_FRAMES, [zeroing.ZEROED.what]),
        (ZERO_FRAMES + SEED_FRAMES, [seeds.SEEDS.what, zeroing.ZEROED.what]),
        (f'vllm-kvq needs x for the setting "{SETTINGS[0].what}", and this vLLM', [SETTINGS[0].what]),
        (
            "vllm_kvq/integration/patches/served/seeds.py:28: in other",
            ["no patch, last of ours in it: patches/served/seeds.py"],
        ),
        ("tests/engine/test_x.py:3: in test_x\nE   assert 1 == 2", ["no patch"]),
    ],
    ids=["pytest's form", "Python's form", "two", "a sentence", "another function", "none"],
)  # fmt: skip
def test_blamed(text: str, expected: list[str]) -> None:
    assert blame.blamed(text, PATCHES) == expected


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.install is not None], ids=lambda p: p.what[:40])
def test_a_patchs_functions(patch: Patch) -> None:
    """Those that it puts in the place of vLLM's are among them, and none from another file."""
    found = blame.functions(patch)
    source = (ROOT / "vllm_kvq" / "integration" / patch.place).read_text(encoding="utf-8")
    assert patch.install is not None
    assert patch.install.__code__.co_name in found
    assert found <= {*re.findall(r"def (\w+)\(", source), "<lambda>", "<genexpr>", "<dictcomp>", "<listcomp>"}
    wraps = {*re.findall(r"        def (\w+)\(", source)}
    named_otherwise = {"patches/served/orphans.py", "patches/served/loaded.py"}
    assert not patch.replaces or found & wraps or patch.place in named_otherwise


def test_two_patches_of_one_file_are_told_apart() -> None:
    from vllm_kvq.integration.patches.registered import platforms

    assert "choose_backends" in blame.functions(platforms.BACKENDS) - blame.functions(platforms.CONFIGURATIONS)


# -- groups of tests --------------------------------------------------------------------------------------------------
TESTS = """
import pytest
def test_good(): pass
@pytest.mark.skip
def test_left_out(): pass
def test_bad():
    print("vllm_kvq/integration/patches/served/seeds.py:28: in _sample")
    assert 1 == 2
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_without(broken): pass
"""


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., groups.Group]:
    def make(text: str, *more: str) -> groups.Group:
        file = tmp_path / "test_made_up.py"
        file.write_text(text)
        return groups.Group("made up", "nothing", (str(file), *more))

    return make


def test_a_group_is_counted(made_up: Callable[..., groups.Group]) -> None:
    found = groups.run(made_up(TESTS), os.environ)
    assert (found.passed, found.skipped, found.crash, found.good) == (1, 1, "", False)
    bad, without = found.failures
    assert bad.test.endswith("test_made_up.py::test_bad")
    assert bad.reason == "assert 1 == 2"
    assert blame.blamed(bad.text, PATCHES) == [seeds.SEEDS.what]  # what the test printed counts, too
    assert without.test.endswith("::test_without")
    assert "no fixture" in without.text
    assert groups.run(made_up(TESTS, "-k", "good or left"), os.environ).good


@pytest.mark.parametrize(
    ("text", "more"),
    [("import no_such", ()), (TESTS, ("-k", "nothing")), (TESTS, ("--no-such",)), ("import os; os._exit(0)", ())],
    ids=["cannot be read", "no test", "cannot start", "ends at once"],
)  # fmt: skip
def test_a_group_that_does_not_run_is_not_good(
    text: str, more: tuple[str, ...], made_up: Callable[..., groups.Group]
) -> None:
    found = groups.run(made_up(text, *more), os.environ)
    assert not found.good
    assert found.failures or found.crash or found.passed == 0


def test_a_page_has_no_path_of_a_machine() -> None:
    said = (
        "Command '['/home/me/.venv/bin/vllm', 'serve', '/tmp/x-1/model0', 'tests/a.py', 'http://host/v1/x']' timed out"
    )
    assert (
        groups.without_paths(said)
        == "Command '['vllm', 'serve', 'model0', 'tests/a.py', 'http://host/v1/x']' timed out"
    )
    assert groups.Failure("x", f"E  {said}").reason == groups.without_paths(said)


def test_an_engines_own_error_is_the_reason() -> None:
    told = ("proof.EngineFailed: of a traceback", "Traceback (most recent call last):", "TypeError: no 'Float'")
    text = "\n".join(f"E   {line}" for line in told) + "\nproof/engines.py:85: EngineFailed"
    assert groups.Failure("x", text).reason == "TypeError: no 'Float'"


def test_every_group_has_tests(request: pytest.FixtureRequest) -> None:
    """In `make test` all modules are collected already; else pytest is asked, which refuses names that do not exist."""
    words = [word for group in groups.GROUPS for word in group.tests]
    wanted = [word for group in groups.GROUPS if "-k" in group.tests for word in group.tests[-1].split(" or ")]
    tests = [word for word in words if word.startswith("tests/")]
    collected = [item.nodeid for item in request.session.items]
    if not all(any(f"{item}/".startswith((f"{t}/", f"{t}::", f"{t}[")) for item in collected) for t in tests):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:]
        collected = done.stdout.splitlines()
    below = [item for item in collected if item.startswith(tuple(tests))]
    assert [word for word in wanted if not any(re.search(rf"::\w*{word}", item) for item in below)] == []
    for group in groups.ALL:
        assert all((ROOT / folder).is_dir() for folder in group.tests)


# -- the command ------------------------------------------------------------------------------------------------------
RELEASE = release.Release("0.33.0", "nothing at all", "/nowhere")
WHOLE = names.Names("0.33.0", tuple(names.Need(p.what, p.place, len(p.needs), ()) for p in PATCHES))
LACKING = replace(WHOLE, needs=(*WHOLE.needs[:-1], replace(WHOLE.needs[-1], lacking=("vllm.x.Y", "vllm.x.Z"))))
PASSED = groups.Outcome(groups.GROUPS[0], 3, 1, (), 5.0)
FAILED = groups.Outcome(groups.GROUPS[1], 2, 0, (groups.Failure("a.py::b", SEED_FRAMES),), 5.0)
CRASHED = groups.Outcome(groups.GROUPS[2], 0, 0, (), 5.0, "no module named pytest")
EMPTY = groups.Outcome(groups.GROUPS[2], 0, 4, (), 5.0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, str]]]:
    """The command without a vLLM: these names are found, these outcomes come."""

    def tell(found: names.Names, *outcomes: groups.Outcome, of: release.Release = RELEASE) -> list[dict[str, str]]:
        seen: list[dict[str, str]] = []
        rest = iter(outcomes)
        monkeypatch.setattr(release, "get", lambda version, folder: of)
        monkeypatch.setattr(main, "names", lambda variables: found)
        monkeypatch.setattr(groups, "run", lambda group, variables: (seen.append(variables), next(rest))[1])
        return seen

    return tell


@pytest.mark.parametrize(
    ("found", "outcome", "status", "said"),
    [
        (WHOLE, PASSED, 0, "vLLM 0.33.0 is admitted: no name is missing, 3 tests passed"),
        (LACKING, PASSED, 1, "vLLM 0.33.0 is not admitted: 1 of the lines above lack names"),
        (WHOLE, FAILED, 1, f"vLLM 0.33.0 is not admitted: 1 tests failed\n  {seeds.SEEDS.what}: 1 failed tests"),
        (WHOLE, CRASHED, 1, "vLLM 0.33.0 is not admitted: not run: models"),
        (WHOLE, EMPTY, 1, "vLLM 0.33.0 is not admitted: not run: models"),
    ],
    ids=["whole", "a name is missing", "a test fails", "pytest does not run", "all are skipped"],
)
def test_the_verdict(
    found: names.Names, outcome: groups.Outcome, status: int, said: str, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    told(found, outcome)
    assert main.main(["0.33", "--groups", "traces"]) == status
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(said) or f"{said}\n" in printed
    assert all(line in printed for need in found.needs for line in need_lines(need))


def test_a_failure_is_said_with_its_patch(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    told(WHOLE, FAILED)
    main.main(["0.33", "--", "tests/a.py"])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  FAILED a.py::b")
    assert lines[at + 1 : at + 3] == [
        "    AttributeError: no discard_request_mask",
        f"    broke by: {seeds.SEEDS.what}",
    ]


def test_a_release_that_is_not_supported_is_named_in_the_environment(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIT, "0.1")
    seen = told(WHOLE, PASSED)
    main.main(["0.33", "--groups", "traces"])
    assert ADMIT not in seen[0]
    assert seen[0]["PYTHONPATH"].split(":")[:2] == ["/nowhere", str(ROOT)]
    seen = told(WHOLE, PASSED, of=replace(RELEASE, version="0.99.0"))
    main.main(["0.99", "--groups", "traces"])
    assert seen[0][ADMIT] == "0.99"


def test_the_page_holds_the_output(told: Any, tmp_path: Path) -> None:
    told(LACKING, FAILED)
    assert main.main(["0.33", "--groups", "traces", "--report", str(tmp_path / "page.md")]) == 1
    page = (tmp_path / "page.md").read_text()
    assert "    python -m proof admit 0.33.0 --groups traces\n" in page
    assert output_of(page)[1:-1] == list(Report(RELEASE, LACKING, [FAILED]).in_short())
    assert page.count("  MISSING  ") == 2  # above and in the list of all
    assert page.count("  ok       ") == len(PATCHES) - 1


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_recorded_pages_are_read(page: Path) -> None:
    lines = output_of(page.read_text(encoding="utf-8"))
    assert lines[1].startswith("vLLM 0.")
    assert any("admitted" in line for line in lines)


@pytest.mark.parametrize("words", [["33"], ["0.33", "--groups", "trace"], ["latest"], []])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    assert stop.value.code == 2
    assert "python -m proof admit: error: " in capsys.readouterr().err


# -- a made-up vLLM ---------------------------------------------------------------------------------------------------
CHANGED = "v1/worker/gpu/warmup.py"


@pytest.fixture
def other_vllm(tmp_path: Path) -> Path:
    """The installed vLLM as release 0.99.0, in which one function has another name."""
    own = release.installed_package()
    assert own is not None
    made = tmp_path / "other" / "vllm"
    for file in (CHANGED, "_version.py"):
        there = made
        for part in (*Path(file).parent.parts, None):
            there.mkdir(parents=True, exist_ok=True)
            for path in (own / there.relative_to(made)).iterdir():
                if not (there / path.name).exists() and path.name != "__pycache__":
                    (there / path.name).symlink_to(path)
            if part is not None:
                (there / part).unlink()
                there = there / part
    changed = (own / CHANGED).read_text().replace("_warmup_block_counter", "_counter_of_blocks")
    for file, text in ((CHANGED, changed), ("_version.py", "__version__ = '0.99.0'\n__version_tuple__ = (0, 99, 0)\n")):
        (made / file).unlink()
        (made / file).write_text(text)
    folder = made.parent
    (folder / release.COMPLETE).write_text(
        json.dumps(release.Release("0.99.0", "a made-up tree", str(folder)).__dict__)
    )
    return folder


INSIDE = """
import vllm
from vllm_kvq.integration import plugin
from vllm_kvq.integration.patches import names

def test_it_is_tried():
    assert vllm.__version__ == "0.99.0"
    assert names.release() == names.SUPPORTED[-1]
    assert "unset the variable to serve" in names.trial()
    assert "support" not in (names.version_problem() or "")
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.wide
def test_a_missing_name_is_reported_under_its_patch(
    other_vllm: Path, made_up: Callable[..., groups.Group], capsys: pytest.CaptureFixture[str]
) -> None:
    tests = made_up(INSIDE).tests
    assert main.main(["0.99", "--folder", str(other_vllm), "--", *tests]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"vLLM 0.99.0 (a made-up tree); not supported, tried as {SUPPORTED[-1]}"
    at = lines.index(f"  MISSING  {warmup.WARMED_UP.what} ({warmup.WARMED_UP.place})")
    assert lines[at + 1].strip() == warmup.COUNTER.replace(":", ".")
    assert f"  ok       {seeds.SEEDS.what} ({seeds.SEEDS.place}): 4 names" in lines
    assert any(line.startswith("tests: 1 passed, 0 failed") for line in lines)
    assert any(line.startswith(f"  {warmup.WARMED_UP.what}: 1 names missing") for line in lines)
    assert any(line.startswith("vLLM 0.99.0 is not admitted: ") for line in lines)


@pytest.mark.engine
def test_a_vllm_that_cannot_be_imported(
    tmp_path: Path, told: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    (broken / "vllm").mkdir(parents=True)
    (broken / "vllm" / "__init__.py").write_text("raise ImportError('half a vLLM')")
    monkeypatch.setattr(release, "get", lambda version, folder: replace(RELEASE, folder=str(broken)))
    assert main.main(["0.33"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("admit: vLLM 0.33.0 can't be imported\n")
    assert "half a vLLM" in said

"""One version everywhere, a release script that refuses anything not ready, and what pyproject.toml declares."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest

import vllm_kvq

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MEASURED_WHERE_INSTALLED = {"flash_attn", "flash_attn_interface"}
"""Competitors that `bench gpu` measures if they are installed; each is built for one CUDA and one torch."""


def imported(folder: Path) -> dict[str, set[str]]:
    """What a folder's modules import from outside: the name, and where."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return {name: where for name, where in found.items() if name not in {*sys.stdlib_module_names, folder.name}}


def declared() -> set[str]:
    """The distributions that users get: dependencies and extras, without `dev`."""
    extras = PROJECT["optional-dependencies"]
    named = PROJECT["dependencies"] + [pin for extra, pins in extras.items() if extra != "dev" for pin in pins]
    return {plain(re.split(r"[\[<>=~!; ]", pin)[0]) for pin in named}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_declared() -> None:
    distributions = packages_distributions()
    found = imported(ROOT / "vllm_kvq")
    assert {"torch", "vllm", "transformers", "matplotlib"} <= set(found)
    missing = {
        name: where
        for name, where in found.items()
        if name not in MEASURED_WHERE_INSTALLED
        and not {plain(dist) for dist in [name, *distributions.get(name, [])]} & declared()
    }
    assert missing == {}


def test_one_version() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    stated = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert stated == [vllm_kvq.__version__]
    assert f"## [{vllm_kvq.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_issue_template_has_the_steps_of_the_page() -> None:
    page = (ROOT / "docs" / "adding-a-format.md").read_text(encoding="utf-8")
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "new-format.md").read_text(encoding="utf-8")
    steps = re.findall(r"^- \[ \] \*\*(\w+)\*\*:", template, re.M)
    assert steps == re.findall(r"^## (\w+)$", page, re.M)
    assert len(steps) == 7


def test_pre_commit_runs_what_ci_runs() -> None:
    """Each command of `make lint types`, and no other; ruff may also fix."""
    yaml = pytest.importorskip("yaml", reason="comes with vLLM")
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", "lint", "types"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    wanted = {line for line in printed.splitlines() if line.startswith(".venv/")}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {" ".join([hook["entry"], *hook.get("args", [])]) for hook in hooks} == wanted
    assert all(hook["pass_filenames"] is False for hook in hooks)
    assert len(wanted) == 5


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGELOG = "# Changelog\n\n## [1.2.3] - 2020-01-02\n\n### Added\n\n- a thing\n\n## [1.2.2] - 2019-01-01\n\n- older\n"


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A repository that can be released."""
    (tmp_path / "vllm_kvq").mkdir()
    (tmp_path / "vllm_kvq" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "m")


def test_a_dry_run_changes_nothing(script: ModuleType, ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--dry-run", "--root", str(ready)]) == 0
    assert capsys.readouterr().out == "release: 1.2.3 can be released: would build a wheel in dist and tag v1.2.3\n"
    assert git(ready, "tag") == ""
    assert not (ready / "dist").exists()


def test_a_release_builds_and_tags(
    script: ModuleType, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ready / "scripts").mkdir()
    (ready / "scripts" / "build_wheel.py").write_text("import sys; sys.exit(sys.argv[2] == 'broken')\n")
    commit(ready)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "n")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "n@example.com")
    assert script.main(["--root", str(ready), "--output", "broken"]) == 1
    assert git(ready, "tag") == ""
    assert script.main(["--root", str(ready)]) == 0
    assert git(ready, "tag").split() == ["v1.2.3"]


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("vllm_kvq/__init__.py", '__version__ = "1.2.3.dev0"\n', "version 1.2.3.dev0 is not a release's"),
        ("vllm_kvq/__init__.py", "version = 1\n", "__init__.py states no version"),
        ("CITATION.cff", "version: 1.2.2\n", "CITATION.cff says version 1.2.2, and vllm_kvq/__init__.py says 1.2.3"),
        ("CHANGELOG.md", CHANGELOG.replace("[1.2.3]", "[1.2.4]"), "has no heading '## [1.2.3] - DATE'"),
        ("CHANGELOG.md", CHANGELOG.replace("2020-01-02", "unreleased"), "dates 1.2.3 'unreleased'"),
        ("CHANGELOG.md", CHANGELOG.replace("2020-01-02", "2999-01-02"), "2999-01-02, which is in the future"),
        ("CHANGELOG.md", CHANGELOG.replace("- a thing\n", ""), "has no entries under 1.2.3"),
    ],
)
def test_what_is_not_ready_is_refused(
    script: ModuleType, ready: Path, file: str, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (ready / file).write_text(text)
    commit(ready)
    assert script.main(["--root", str(ready)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("release: ")
    assert sentence in said
    assert git(ready, "tag") == ""


def test_uncommitted_and_tagged(script: ModuleType, ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ready / "new.py").write_text("")
    assert script.main(["--dry-run", "--root", str(ready)]) == 1
    assert "uncommitted changes (new.py)" in capsys.readouterr().err
    commit(ready)
    git(ready, "tag", "v1.2.3")
    assert script.main(["--dry-run", "--root", str(ready)]) == 1
    assert "v1.2.3 is tagged already; raise __version__" in capsys.readouterr().err


def test_csrc_is_checked_as_clang_format_says(tmp_path: Path) -> None:
    """Every source is checked: one that is not formatted gives status 1."""
    spec = importlib.util.spec_from_file_location("clang_format", ROOT / "scripts" / "clang_format.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.copy(ROOT / ".clang-format", tmp_path)
    folder = tmp_path / "csrc" / "cpu" / "pack"
    folder.mkdir(parents=True)
    module.ROOT = tmp_path
    (folder / "good.h").write_text("inline int one() { return 1; }\n")
    assert module.main(["--check"]) == 0
    (folder / "bad.cu").write_text("inline int two( ) {return 2;}\n")
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert (folder / "bad.cu").read_text() == "inline int two() { return 2; }\n"

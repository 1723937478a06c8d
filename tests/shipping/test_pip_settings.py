"""The tests also pass on a machine whose pip forbids, renames or redirects packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import clean_environment
import example_format
import pip_settings
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constraints that forbid what `package` makes, named by a variable and by a configuration file."""
    constraints, settings = tmp_path / "constraints.txt", tmp_path / "pip.conf"
    constraints.write_text("small==2.0\n")
    settings.write_text(f"[global]\nconstraint = {constraints}\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'small'\nversion = '1.0'\n[tool.setuptools]\npy-modules = []\n"
    )
    return folder


def install(package: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--quiet", str(package)]
    return subprocess.run(
        [*command, "--target", str(package.parent / "installed")],
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.usefixtures("planted")
def test_what_is_planted_would_be_obeyed(package: Path) -> None:
    done = install(package, os.environ)
    assert done.returncode != 0
    assert "small" in done.stderr


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    "environment",
    [
        lambda folder: pip_settings.without_the_machines(os.environ),
        lambda folder: {**clean_environment.variables(folder), "PATH": os.environ["PATH"]},
        lambda folder: {**example_format.environment(folder), **example_format.offline(folder)},
    ],
    ids=["tests", "clean environments", "the example format"],
)
def test_environments_do_not_have_it(
    environment: Callable[[Path], dict[str, str]], package: Path, tmp_path: Path
) -> None:
    done = install(package, environment(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("planted")
def test_a_run_of_the_tests_does_not_have_it() -> None:
    """What a test's own `pip` inherits (test_wheel.py, test_bootstrap.py), as conftest.py leaves it."""
    code = "import conftest, runpy, sys; sys.argv[1:] = ['config', 'list']; runpy.run_module('pip', None, '__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, *(TESTS / "helpers").iterdir())))},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == [f":env:.config-file='{os.devnull}'"]

"""The example format's package, installed as users install theirs; nothing is fetched from a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pip_settings

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "examples" / "int4_hadamard"


def offline(folder: Path) -> dict[str, str]:
    """Variables with which `pip install PACKAGE` installs only the package, into `folder`."""
    # pip reads its negative options inverted: "0" is without isolation
    return {"PIP_TARGET": str(folder), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}


def environment(installed: Path) -> dict[str, str]:
    """For processes that find the commands of this environment, this checkout and what is installed there."""
    alike = pip_settings.without_the_machines(os.environ)
    variables = {name: value for name, value in alike.items() if name != "PYTHONPATH"}
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **variables,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)]),
        "OMP_NUM_THREADS": "1",
    }


def install(work: Path, change: Callable[[str], str] = lambda code: code) -> Path:
    """Install the example with changed code; returns the folder. A copy is built, because setuptools writes into it."""
    source, installed = work / "int4_hadamard", work / "installed"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    code = source / "int4_hadamard.py"
    code.write_text(change(code.read_text()))
    command = [sys.executable, "-m", "pip", "install", "--quiet", str(source)]
    subprocess.run(command, env={**environment(installed), **offline(installed)}, check=True, timeout=500)
    return installed

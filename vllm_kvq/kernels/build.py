"""Compiles csrc/cpu into a shared library, once per source, compiler and flags, and loads it.

The library needs no torch headers (tensors cross through apache-tvm-ffi's DLPack ABI), so any g++ >= 11 or
clang works and one build serves every torch. Each instruction set is its own translation unit; the processor
chooses at run time. Built into the package's `_build` directory where it is writable, else into the user's
cache; to a temporary name first and then renamed, so that no process ever sees half a file. Of processes that need
it at once (the ranks of a server) one compiles and the others wait.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
]
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
ISA_FLAGS = {
    "avx2": _AVX2,
    "avx512bw": _AVX512,
    "avx512": [*_AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"],  # bf16: only called where present
}
"""By the name of a source: isa/avx2.cpp, ..."""


EXTRA_FLAGS = "VLLM_KVQ_CXXFLAGS"
"""A variable with further flags for the compiler and the linker. Every set of them has a build of its own."""


class BuildError(RuntimeError):
    """The library can't be built or loaded here; the PyTorch kernels can still do the work."""


def source_dir(name: str = "cpu") -> Path:
    package = Path(__file__).resolve().parents[1]
    for path in (package / "csrc" / name, package.parent / "csrc" / name):
        if path.is_dir():
            return path
    raise BuildError(f"the C++ sources (csrc/{name}) are not installed")


def compiler() -> list[str]:
    """The command from $CXX, else the first of g++, clang++ and c++ that exists."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found (g++ >= 11 or clang++)")


def extra_flags() -> list[str]:
    return os.environ.get(EXTRA_FLAGS, "").split()


def sources(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.cpp"))


def flags_of(source: Path) -> list[str]:
    x86 = platform.machine() in ("x86_64", "AMD64")
    return [
        *FLAGS,
        *(ISA_FLAGS.get(source.stem, []) if x86 else []),
        *extra_flags(),
    ]


def _key(command: list[str], directory: Path) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    digest.update(repr((command, version, FLAGS, ISA_FLAGS, extra_flags(), platform.machine(), _ffi()[1:])).encode())
    for path in sorted(directory.rglob("*.[hc]*")):
        digest.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _ffi() -> tuple[list[str], str, str]:
    import tvm_ffi
    from tvm_ffi import libinfo

    return libinfo.include_paths(), libinfo.find_libtvm_ffi(), tvm_ffi.__version__


def _cache_dir() -> Path:
    """$VLLM_KVQ_CACHE, else the package's own directory, else the user's cache."""
    if os.environ.get("VLLM_KVQ_CACHE"):
        path = Path(os.environ["VLLM_KVQ_CACHE"])
        path.mkdir(parents=True, exist_ok=True)
        return path
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_kvq"
    for path in (Path(__file__).resolve().parents[1] / "_build", user):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK):
            return path
    raise BuildError(f"neither the package's directory nor {user} is writable; set VLLM_KVQ_CACHE")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()[-4000:]}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process is in here; it ends with the process, however that ends."""
    with open(folder / "lock", "w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: then all of them compile
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _target(name: str) -> Path:
    return _cache_dir() / f"{name}-{_key(compiler(), source_dir(name))}.so"


def built(name: str = "cpu") -> Path | None:
    """What `build` would return without compiling anything; None where it would have to."""
    try:
        target = _target(name)
    except (BuildError, OSError, ImportError, subprocess.SubprocessError):
        return None
    return target if target.exists() else None


def build(name: str = "cpu") -> Path:
    """The path of the library of csrc/`name`, compiled if it isn't there yet."""
    try:
        directory, command = source_dir(name), compiler()
        target = _target(name)
        if target.exists():
            return target
        includes, library, _ = _ffi()
        with _alone(target.parent), tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as tmp:
            if target.exists():
                return target
            include = [f"-isystem{i}" for i in includes]
            every = sources(directory)
            objects = [f"{tmp}/{source.parent.name}-{source.stem}.o" for source in every]
            lines = [
                [*command, *flags_of(source), *include, "-c", str(source), "-o", target]
                for source, target in zip(every, objects, strict=True)
            ]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(_run, lines))
            _run([*command, *extra_flags(), "-shared", "-o", f"{tmp}/out.so", *objects, library])
            os.replace(f"{tmp}/out.so", target)
        return target
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from error


@functools.cache
def load() -> Any:
    """The loaded library, a tvm_ffi module: its functions are attributes. Raises BuildError."""
    path = build()
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:
        raise BuildError(f"{path} can't be loaded: {error}") from error


def main() -> int:
    argparse.ArgumentParser(prog="vllm_kvq.kernels", description="Builds the CPU kernels ahead of time.").parse_args()
    try:
        print(f"CPU kernels: {build().name}", flush=True)
        return 0
    except BuildError as error:
        print(f"CPU kernels can't be built: {error}", file=sys.stderr)
        return 1

"""Compiles csrc/cpu into a shared library, once per source, compiler and flags, and loads it.

The library needs no torch headers (tensors cross through apache-tvm-ffi's DLPack ABI), so any g++ >= 11 or clang
works and one build serves every torch. Each instruction set is its own translation unit; the processor's is chosen at
run time. A wheel for a platform (scripts/build_wheel.py) carries the library of exactly its sources in `_prebuilt`;
then nothing is compiled. Otherwise the library is built into the package's `_build` directory if that is writable, else
into the user's cache; it is found in both. It has a temporary name until it is complete, so no process ever sees half a
file. If several processes need it at once, one compiles and the others wait. That takes minutes, so the log reports
progress.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from vllm_kvq.kernels import compiled, trust
from vllm_kvq.kernels.folders import CACHE, named_folder, user_folder

# only a name: a vLLM server shows what is logged below `vllm`
logger = logging.getLogger("vllm.kvq")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wno-uninitialized",  # g++ 12 says it a thousand times about its own intrinsics
    "-Wno-maybe-uninitialized",
]
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
_VNNI = [*_AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"]  # bf16: only called where present
ISA_FLAGS = {
    "avx2": _AVX2,
    "avx512bw": _AVX512,
    "avx512": _VNNI,
    "amx": [*_VNNI, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
}
"""Flags by the name of a source: library/avx2.cpp, ..."""


COMPILE_SECONDS, LONGEST_SECONDS = 150, 40
"""One core's time for all of csrc/cpu, and for its longest source (Xeon with AVX-512, g++ 12); the log's estimate."""
SILENT_SECONDS = 20
"""The interval between progress messages while it compiles."""

EXTRA_FLAGS = "VLLM_KVQ_CXXFLAGS"
"""A variable with additional flags for the compiler and the linker. Every set of flags has its own build."""


_UNFINISHED = "tmp-library-"

PREBUILT = Path(__file__).resolve().parents[1] / "_prebuilt"
"""Where a wheel carries its library. A checkout has no such folder."""

BUILT = Path(__file__).resolve().parents[1] / "_build"
"""The package's own folder for what is compiled here. Anyone but its owner only reads it."""


_OWN = f"set {CACHE} to a folder that belongs to this user and that only this user can write to"
_ROOM = f"make room where compiled kernels are kept and in $TMPDIR, or set {CACHE} and TMPDIR to other folders"
_ELSEWHERE = f"set {CACHE} to a folder that can be written"
_MEMORY = "free some memory, or compile one source at a time: taskset -c 0 python -m vllm_kvq.kernels"
_ADVICE = {
    "No space left on device": _ROOM,
    "Disk quota exceeded": _ROOM,
    "Read-only file system": _ELSEWHERE,
    "Permission denied": _ELSEWHERE,
    "Killed signal": _MEMORY,
    "Cannot allocate memory": _MEMORY,
}
"""What to do where a compiler or the system says this."""


class BuildError(RuntimeError):
    """The library can't be built or loaded here; the PyTorch kernels can still serve."""


class WheelError(ValueError):
    """The wheel carries a library that can't serve its own sources: the installation is broken."""


def source_dir(name: str = "cpu") -> Path:
    package = Path(__file__).resolve().parents[1]
    for path in (package / "csrc" / name, package.parent / "csrc" / name):
        if path.is_dir():
            return path
    raise BuildError(f"the sources in csrc/{name} are not installed")


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
    """In the order in which they are compiled: none of the longest, in library/, is left until last."""
    return sorted(directory.rglob("*.cpp"), reverse=True)


def flags_of(source: Path) -> list[str]:
    x86 = platform.machine() in ("x86_64", "AMD64")
    return [
        *FLAGS,
        *(ISA_FLAGS.get(source.stem, []) if x86 else []),
        *extra_flags(),
    ]


def sources_key(directory: Path) -> str:
    """A hash of what is compiled and how, independent of the compiler used."""
    digest = hashlib.sha256(repr((FLAGS, ISA_FLAGS, platform.machine())).encode())
    for path in sorted(directory.rglob("*.[hc]*")):
        digest.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _key(command: list[str], directory: Path) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    compiled_by = repr((command, version, extra_flags(), ffi()[1:]))
    return hashlib.sha256((compiled_by + sources_key(directory)).encode()).hexdigest()[:16]


def prebuilt_name(name: str = "cpu") -> str:
    """The name of the library of csrc/`name` in a wheel."""
    return f"{name}-{sources_key(source_dir(name))}.so"


def prebuilt(name: str = "cpu") -> Path | None:
    """The library that this wheel carries; None if there is none, or if the user sets their own flags.

    Raises WheelError if it was not compiled from the sources installed with it.
    """
    if extra_flags() or not any(PREBUILT.glob(f"{name}-*.so")):
        return None
    path = PREBUILT / prebuilt_name(name)
    if not path.exists():
        raise WheelError(
            f"the compiled library in {PREBUILT} was not built from the installed C++ sources; reinstall vllm-kvq"
        )
    return path


def ffi() -> tuple[list[str], str, str]:
    import tvm_ffi
    from tvm_ffi import libinfo

    return libinfo.include_paths(), libinfo.find_libtvm_ffi(), tvm_ffi.__version__


def _cache_dir() -> Path:
    """$VLLM_KVQ_CACHE, else the package's own directory, else the user's cache."""
    if (path := named_folder()) is not None:
        try:
            path.mkdir(0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"{CACHE} is {path}, which can't be made into a folder: {error.strerror}") from error
        if (who := trust.folder_writers(path)) is not None:
            raise BuildError(f"{CACHE} is {path}, from which no library is loaded, because {who}; {_OWN}")
        return path
    problems = []
    for path in filter(None, (BUILT, user_folder())):
        try:
            path.mkdir(0o755, parents=True, exist_ok=True)
        except OSError as error:
            problems.append(f"{path} can't be made ({error.strerror})")
            continue
        if not os.access(path, os.W_OK):
            problems.append(f"{path} is not writable")
        elif (who := trust.folder_writers(path)) is not None:
            problems.append(f"{path} is not trusted, because {who}")
        else:
            return path
    raise BuildError(f"there is no folder for compiled kernels: {', '.join(problems)}; {_OWN}")


def place(name: str) -> Path:
    """The path of a library: where there is one that can be loaded, else where it is to be compiled.

    The package's own folder is read even by those who can't write to it: an image's kernels are compiled by root.
    """
    folders = (BUILT, user_folder()) if (named := named_folder()) is None else (named,)
    there = (folder / name for folder in folders if folder is not None and compiled.is_there(folder / name))
    return next(there, None) or _cache_dir() / name


def advised(error: Exception) -> BuildError:
    """The same, with what to do about it if that is known."""
    sentence = str(error)
    advice = next((advice for said, advice in _ADVICE.items() if said in sentence), None)
    return BuildError(sentence if advice is None else f"{sentence}; {advice}")


def run(command: list[str]) -> None:
    """Runs a compiler, which says in English what is wrong."""
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=english)
    if done.returncode:
        said = done.stderr or done.stdout
        raise BuildError(f"{' '.join(command)}\n{said.strip()[-4000:]}\n{_cause(said)}")


def _cause(said: str) -> str:
    """The line in which a compiler names what is wrong; the last one may be "compilation terminated."."""
    lines = said.strip().splitlines() or ["the compiler says nothing"]
    return next((line for line in lines if "error:" in line), lines[-1])


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A new folder in this one, to compile in, under a lock between processes. The lock is released when its process
    exits, even after a crash."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks: then every process compiles
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("kvq: waiting for another process that is compiling kernels")
                fcntl.flock(file, fcntl.LOCK_EX)
            for left in folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as made:
            yield Path(made)


def _compile(lines: list[list[str]], workers: int) -> None:
    """Runs the compilers, `workers` at a time, and reports progress."""
    started = time.monotonic()
    minutes = math.ceil(max(LONGEST_SECONDS, COMPILE_SECONDS / workers) / 60)
    logger.info(
        "kvq: compiling the C++ kernels, once, on %d cores: about %d minute%s (a wheel for this platform brings them "
        "compiled)",
        workers,
        minutes,
        "" if minutes == 1 else "s",
    )
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(run, line) for line in lines}
        try:
            while running:
                done, running = wait(running, timeout=SILENT_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                seconds = time.monotonic() - started
                logger.info(
                    "kvq: %d of %d sources compiled after %.0f s", len(lines) - len(running), len(lines), seconds
                )
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def _target(name: str) -> Path:
    return place(f"{name}-{_key(compiler(), source_dir(name))}.so")


def why_no_folder() -> str | None:
    """Why libraries can be neither compiled nor loaded here; None: there is a folder for them."""
    try:
        _cache_dir()
    except (BuildError, OSError) as error:
        return str(error)
    return None


def built(name: str = "cpu") -> Path | None:
    """What `build` would return without compiling; None if it would have to compile. Raises WheelError."""
    if (carried := prebuilt(name)) is not None:
        return carried
    try:
        target = _target(name)
    except (BuildError, OSError, ImportError, subprocess.SubprocessError):
        return None
    return target if compiled.is_there(target) else None


def build(name: str = "cpu") -> Path:
    """The path of the library of csrc/`name`: the wheel's, or one compiled here if it isn't there yet."""
    if (carried := prebuilt(name)) is not None:
        return carried
    try:
        directory, command = source_dir(name), compiler()
        target = _target(name)
        if compiled.is_there(target):
            return target
        includes, library, _ = ffi()
        with workspace(target.parent) as work:
            if compiled.is_there(target):
                return target
            if target.exists():
                logger.warning("kvq: %s %s; it is compiled again", target, compiled.why_not(target))
            include = [f"-isystem{i}" for i in includes]
            every = sources(directory)
            objects = [str(work / f"{source.parent.name}-{source.stem}.o") for source in every]
            lines = [
                [*command, *flags_of(source), *include, "-c", str(source), "-o", target]
                for source, target in zip(every, objects, strict=True)
            ]
            _compile(lines, len(os.sched_getaffinity(0)))
            run([*command, *extra_flags(), "-shared", "-o", str(work / "out.so"), *objects, library])
            compiled.publish(work / "out.so", target)
        return target
    except (OSError, ImportError, subprocess.SubprocessError, BuildError) as error:
        raise advised(error) from error


@functools.cache
def load() -> Any:
    """The loaded library, a tvm_ffi module: its functions are attributes. Raises BuildError or WheelError."""
    path = build()
    try:
        return compiled.load(path, shipped=path.parent == PREBUILT)
    except Exception as error:
        reason = f"{path} can't be loaded: {error}"
        if path.parent == PREBUILT:
            raise WheelError(f"{' '.join(reason.split())}; reinstall vllm-kvq") from error
        raise BuildError(reason) from error


def main() -> int:
    argparse.ArgumentParser(
        prog="vllm_kvq.kernels", description="Build the CPU kernels ahead of time.", allow_abbrev=False
    ).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(f"CPU kernels: {build().name}", flush=True)
        return 0
    except (BuildError, WheelError) as error:
        print(f"CPU kernels can't be built: {error}", file=sys.stderr)
        return 1

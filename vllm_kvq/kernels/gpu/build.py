"""Compiles csrc/cuda: one library per GPU architecture, and the emulation that tests run on a CPU.

    python -m vllm_kvq.kernels.gpu.build --arch 90        ahead of time; without --arch: for the GPU in this machine

Built at first use and kept next to the CPU kernels' library (kernels/build.py). A library built once, on this
machine or another with the same sources, works without nvcc if $VLLM_KVQ_CACHE holds it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_kvq.kernels import build as shared
from vllm_kvq.kernels import compiled
from vllm_kvq.kernels.build import BuildError
from vllm_kvq.kernels.folders import CACHE

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities, as in 90, that are compiled and checked in CI."""

FLAGS = ["-std=c++17", "-O3", "-lineinfo"]
EMULATION_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-Wall", "-DKVQ_EMULATE"]


def nvcc() -> str | None:
    """$CUDA_HOME/bin/nvcc, else the one on the PATH."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def architecture_for(capability: tuple[int, int]) -> int:
    """The newest architecture whose code runs on a GPU of this compute capability: same major, no newer minor."""
    major, minor = capability
    fitting = [a for a in ARCHITECTURES if a // 10 == major and a % 10 <= minor]
    if not fitting:
        known = ", ".join(f"{a // 10}.{a % 10}" for a in ARCHITECTURES)
        raise BuildError(f"the CUDA kernels are not built for compute capability {major}.{minor}; they are for {known}")
    return fitting[-1]


def _digest(*more: object) -> str:
    """A hash of the sources and whatever else affects the result, but not of nvcc's version: nvcc may be absent."""
    digest = hashlib.sha256(repr((*more, shared.ffi()[2])).encode())
    for path in sorted(shared.source_dir("cuda").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _source() -> str:
    return str(shared.source_dir("cuda") / "api.cu")


def run_compiler(command: list[str], target: Path) -> Path:
    """The target, which appears only when it is complete. One process compiles it while the others wait."""
    with shared.workspace(target.parent) as work:
        if not compiled.is_there(target):  # another process may have made it meanwhile
            shared.run([*command, "-o", str(work / "out")])
            compiled.publish(work / "out", target)
    return target


def _target(architecture: int) -> Path:
    """The path of the library for one architecture. BuildError if it does not exist and can't be built."""
    target = shared.place(f"cuda-sm{architecture}-{_digest(FLAGS)}.so")
    if compiled.is_there(target) or nvcc() is not None:
        return target
    raise BuildError(
        f"no CUDA kernels for sm_{architecture}: no built library in {target.parent} and no nvcc on the path "
        f"(install the CUDA toolkit, set CUDA_HOME, or build elsewhere and set {CACHE})"
    )


def why_not(capability: tuple[int, int]) -> str | None:
    """One sentence if no kernels are available for a GPU of this compute capability, else None; compiles nothing."""
    try:
        _target(architecture_for(capability))
    except (OSError, ImportError, BuildError) as error:
        return str(error)
    return None


def build(architecture: int) -> Path:
    """The path of the library for one architecture, compiled if it isn't there yet."""
    try:
        target = _target(architecture)
        if compiled.is_there(target):
            return target
        compiler = nvcc() or ""
        includes, library, _ = shared.ffi()
        command = [compiler, *FLAGS, "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        command += [f"-I{i}" for i in includes] + [_source(), library]
        return run_compiler(command, target)
    except (OSError, ImportError, subprocess.SubprocessError, BuildError) as error:
        raise shared.advised(error) from error


def build_emulation() -> Path:
    """The same source for CPU tensors (csrc/cuda/emulate.h): slow, only for tests."""
    compiler = shared.compiler()
    target = shared.place(f"cuda-emulated-{_digest(EMULATION_FLAGS, compiler)}.so")
    if compiled.is_there(target):
        return target
    includes, library, _ = shared.ffi()
    command = [*compiler, *EMULATION_FLAGS, "-shared", *(f"-isystem{i}" for i in includes)]
    return run_compiler([*command, "-x", "c++", _source(), "-x", "none", library], target)


def _load(path: Path) -> Any:
    try:
        return compiled.load(path)
    except Exception as error:
        raise BuildError(f"{path} can't be loaded: {error}") from error


@functools.cache
def load(architecture: int) -> Any:
    return _load(build(architecture))


@functools.cache
def load_emulation() -> Any:
    return _load(build_emulation())


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Build the CUDA kernels ahead of time.")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, help="architectures, as in 90")
    architectures = parser.parse_args().arch
    try:
        if not architectures:
            import torch

            if not torch.cuda.is_available():
                raise BuildError("there is no GPU here to build for; name the architecture, as in --arch 90")
            architectures = [architecture_for(torch.cuda.get_device_capability())]
        for architecture in architectures:
            print(f"CUDA kernels: {build(architecture).name}")
    except BuildError as error:
        print(f"CUDA kernels can't be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

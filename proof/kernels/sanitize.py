"""Builds of the CPU kernels with g++'s sanitizers, and the environment in which Python can load them.

    python -m proof sanitize address,undefined -- python -m pytest tests/kernels/fuzz/test_cpu_fuzz.py
    python -m proof sanitize thread -- python -m pytest tests/kernels/fuzz/test_cpu_fuzz.py
    python -m proof sanitize address --server                  # decode steps inside a real server
    python -m proof sanitize --without avx2,avx512bw,amx address -- COMMAND  # compiles in half the time

A process that loads such a library must have had the sanitizer's run-time library from its start, so the command
runs with it preloaded and finds the build through $VLLM_KVQ_CXXFLAGS. The first error stops the process.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from proof.kernels import left_out
from proof.kernels.sanitized_server import serve
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.table import suite
from vllm_kvq.kernels.build import EXTRA_FLAGS, BuildError, build, compiler

KINDS = ("address", "undefined", "thread")
_RUNTIME = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}


def parse(text: str) -> tuple[str, ...]:
    """A comma-separated list of sanitizers, sorted."""
    kinds = tuple(sorted({k.strip() for k in text.split(",") if k.strip()}))
    unknown = [k for k in kinds if k not in KINDS]
    if unknown:
        raise ValueError(f"no such sanitizer: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if "thread" in kinds and len(kinds) > 1:
        raise ValueError("the thread sanitizer can't be combined with another")
    return kinds


# Pointer checks that the address sanitizer makes anyway. With them, and with accesses checked inline, unrolled
# kernels take many minutes to compile; KVQ_SANITIZED leaves out all head sizes of the integer kernels but one.
_CHEAP = [
    *("-O1", "-g1", "-fno-omit-frame-pointer", "-DKVQ_SANITIZED", "-w", "-fno-sanitize-recover=all"),
    *("-fno-sanitize=null,alignment,object-size,pointer-overflow", "-fno-sanitize-address-use-after-scope"),
    *("--param", "asan-instrumentation-with-call-threshold=0"),
]


def flags(kinds: tuple[str, ...], without: Sequence[str] = ()) -> list[str]:
    """`without`: instruction sets that are left out."""
    found = [f"-fsanitize={','.join(kinds)}", *_CHEAP, *left_out.flags(without)]
    # the thread sanitizer can't see that OpenMP's barriers order what the threads do
    return [*found, "-DKVQ_STD_THREADS", "-pthread"] if "thread" in kinds else found


# torch's loops, and MKL in the same library, run on OpenMP as well, and never call a function of ours.
# (They can't be given one thread: OMP_NUM_THREADS is also the number of threads of the kernels' loops.)
_SUPPRESSIONS = "race:libtorch_cpu.so\n"


def environment(
    kinds: tuple[str, ...], command: list[str], suppressions: str, without: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of a process that loads a library built by `command`, a g++; `suppressions` names a file."""
    libraries = [_RUNTIME[k] for k in kinds]
    # libstdc++ too: the address sanitizer looks __cxa_throw up when it starts
    paths = [_library(command, name) for name in [*libraries, "libstdc++.so.6"]]
    return {
        **os.environ,
        EXTRA_FLAGS: " ".join(flags(kinds, without)),
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=97",  # Python itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=97",
        "TSAN_OPTIONS": f"halt_on_error=1:exitcode=97:report_bugs=1:suppressions={suppressions}",
        "PYTHONMALLOC": "malloc",
    }


def _library(command: list[str], name: str) -> str:
    done = subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    if not os.path.isabs(path):
        raise OSError(f"{' '.join(command)} has no {name}; sanitizers need g++ and its run-time libraries")
    return os.path.realpath(path)


def run(kinds: tuple[str, ...], compiler: list[str], command: list[str], without: Sequence[str]) -> int:
    if "thread" in kinds:
        # the thread sanitizer's address map does not fit the most random layouts of newer kernels
        command = ["setarch", platform.machine(), "-R", *command]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".supp") as suppressions:
        suppressions.write(_SUPPRESSIONS)
        suppressions.flush()
        return subprocess.run(command, env=environment(kinds, compiler, suppressions.name, without)).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof sanitize", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("kinds", metavar="LIST", type=parse, help="address,undefined or thread")
    parser.add_argument("--server", action="store_true", help="run a server with that build (sanitized_server.py)")
    parser.add_argument(
        "--formats",
        type=words(sorted(FORMATS)),
        default=list(suite("methods")),
        metavar="FORMAT,...",
        help="formats of the servers' caches",
    )
    left_out.add_to(parser)
    parser.add_argument("command", nargs="*", help="command to run with that build, after `--`")
    args = parser.parse_args(argv)
    if args.server and (args.command or "thread" in args.kinds):
        parser.error("--server takes no command, and no thread sanitizer: PyTorch's own threads would be reported")
    os.environ[EXTRA_FLAGS] = " ".join(flags(args.kinds, args.without))
    try:
        library = build()
        print(f"CPU kernels: {library.name}", flush=True)
        if args.server:
            return serve(environment(args.kinds, compiler(), os.devnull, args.without), library, args.formats)
        return run(args.kinds, compiler(), args.command, args.without) if args.command else 0
    except (BuildError, OSError) as error:
        print(f"CPU kernels can't be built: {error}", file=sys.stderr)
        return 1

"""A command with the CPU kernels for AVX-512, VNNI and AMX, on a processor that only has AVX2.

    git clone --depth 1 https://github.com/simd-everywhere/simde
    python -m proof emulate simde -- python -m pytest tests/kernels -k "avx512 or tiles"
    python -m proof emulate --without avx512bw simde -- COMMAND  # compiles in less time

SIMDe (0.8 or later) has headers that compute each intrinsic of AVX-512 with AVX2's instructions; the tiles of AMX are
arrays (csrc/cpu/isa). The sources are those that a processor with these instructions runs. It takes minutes to
compile, and the kernels are slow, so it says nothing about speed, nor about instructions spelled out
in assembly (vpdpbusd).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from proof.kernels import left_out
from vllm_kvq.kernels.build import EXTRA_FLAGS, BuildError, build

HEADERS = Path("simde") / "x86" / "avx512.h"


def flags(simde: Path, without: Sequence[str] = ()) -> list[str]:
    """`without`: instruction sets that are left out. Few rows meet tiles, too."""
    emulated = ["-DKVQ_EMULATED_AVX512", "-DKVQ_EMULATED_TILES", "-DKVQ_LEAST_TILE_ROWS=1"]
    quick = ["-O1", "-w", "-DSIMDE_NO_INLINE"]  # inlined, SIMDe's functions take g++ more than six minutes and 4 GB
    return [*quick, "-mno-avx512f", f"-isystem{simde}", *emulated, *left_out.flags(without)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof emulate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("simde", metavar="FOLDER", type=Path, help="a checkout of SIMDe")
    left_out.add_to(parser)
    parser.add_argument("command", nargs="*", help="command to run with that build, after `--`")
    args = parser.parse_args(argv)
    simde = args.simde.resolve()
    if not (simde / HEADERS).is_file():
        parser.error(f"{simde} has no {HEADERS}; git clone --depth 1 https://github.com/simd-everywhere/simde")
    os.environ[EXTRA_FLAGS] = " ".join(flags(simde, args.without))
    try:
        print(f"CPU kernels: {build().name}", flush=True)
        return subprocess.run(args.command).returncode if args.command else 0
    except (BuildError, OSError) as error:
        print(f"CPU kernels can't be built: {error}", file=sys.stderr)
        return 1

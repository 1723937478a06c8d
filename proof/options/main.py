"""The command `python -m proof options`.

    python -m proof options --seed 1 --cases 1000            random combinations of every format, C++ and PyTorch
    python -m proof options --seed 1 --minutes 10 --path GPU  the GPU's kernels, interpreted: seconds each
    python -m proof options --replay FILE                    one combination, as printed after a finding

Exits with 1 where a combination lacks one of the properties of proof/options/judge.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from proof.options.case import Case
from proof.options.draw import BLOCK_SIZES, draw
from proof.options.judge import WISHES, Verdict, judge
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import FORMATS

DEFAULT_CASES = 200
SERVED = [name for name, fmt in FORMATS.items() if not fmt.keys.reference_only and not fmt.values.reference_only]
"""Formats that kernels know."""
INTERPRETED = (32, 64)
"""Block sizes where the GPU's kernels are interpreted, for time's sake."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False,
        prog="python -m proof options", description="Random combinations of options, each judged by the reference.",
        epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--cases", type=int, default=DEFAULT_CASES, help="combinations (default: %(default)s)")
    length.add_argument("--minutes", type=float, help="keep drawing for this long")
    parser.add_argument("--formats", type=words(sorted(SERVED)), default=SERVED, metavar="FORMAT,...")
    parser.add_argument("--path", type=words([*WISHES]), default=["PyTorch", "C++"], metavar="PATH,...")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="judge this one combination")
    options = parser.parse_args(argv)
    if options.cases < 1 or (options.minutes is not None and options.minutes <= 0):
        parser.error("--cases and --minutes must be positive")
    try:
        cases = [Case.from_json(json.loads(options.replay.read_text(encoding="utf-8")))] if options.replay else None
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"--replay {options.replay} holds no case: {error}")
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    if cases is None:
        end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        return _run(options, end)
    verdict = judge(cases[0], tuple(options.path))
    print("\n".join(verdict.findings) or _judged(verdict))
    return int(bool(verdict.findings))


def _run(options: argparse.Namespace, end: float | None) -> int:
    rng, paths, counts = Random(options.seed), tuple(options.path), Counter[str]()
    sizes = INTERPRETED if "GPU" in paths else BLOCK_SIZES
    drawn = found = 0
    while drawn < options.cases if end is None else time.monotonic() < end:
        case = draw(rng, options.formats[drawn % len(options.formats)], sizes)
        drawn += 1
        verdict = judge(case, paths)
        counts.update(verdict.paths or ["refused" if verdict.refused else "on none of the paths"])
        if verdict.findings:
            found += 1
            print("\n".join(verdict.findings))
            print(f"save the next line in a file and judge it again with: --replay FILE --path {' '.join(paths)}")
            print(json.dumps(case.to_json()), flush=True)
    print(f"seed {options.seed}: {drawn} combinations, {found} with findings; judged: {_counted(counts)}")
    return int(found > 0)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "none"


def _judged(verdict: Verdict) -> str:
    if verdict.refused:
        return f"refused: {verdict.refused}"
    return f"no finding on {', '.join(verdict.paths) or 'no path'}"

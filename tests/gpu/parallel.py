"""Cases over as many processes as there are cores: what takes long on a GPU machine is compiling kernels.

Without a GPU the same cases run on CPU tensors, under Triton's interpreter and the CUDA kernels' emulation: slowly, and
only to see that the scripts work.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from vllm_kvq.kernels.gpu import loading

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = tuple[Callable[..., None], tuple[Any, ...]]

loading.load()


def name_of(case: Case) -> str:
    function, arguments = case
    return f"{function.__name__.strip('_')} {' '.join(str(a) for a in arguments)}"


def _run(case: Case) -> str | None:
    torch.set_num_threads(1)
    try:
        case[0](*case[1])
    except Exception:
        return traceback.format_exc()
    return None


def failed(case: Case) -> bool:
    """Runs one case here; prints what went wrong."""
    error = _run(case)
    print(f"{'FAILED' if error else 'passed'} {name_of(case)}\n{error or ''}".rstrip(), flush=True)
    return error is not None


def run(cases: Sequence[Case]) -> int:
    """Runs every case and prints those that fail; returns the exit status."""
    start, failed = time.monotonic(), 0
    jobs = min(len(cases), 12, len(os.sched_getaffinity(0)))
    if jobs == 1:
        answers = ((case, _run(case)) for case in cases)
    else:
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        waiting = {pool.submit(_run, case): case for case in cases}
        answers = ((waiting[done], done.result()) for done in as_completed(waiting))
    for case, error in answers:
        if error is not None:
            failed += 1
            print(f"FAILED {name_of(case)}\n{error}", flush=True)
    took = time.monotonic() - start
    print(f"{len(cases) - failed} of {len(cases)} cases passed in {took:.1f} s, {jobs} at a time, on {DEVICE}")
    return 1 if failed else 0


def main(cases: Sequence[Case]) -> None:
    """With --dry-run: the first and the last case, on a machine without a GPU."""
    sys.exit(run([cases[0], cases[-1]] if "--dry-run" in sys.argv else cases))

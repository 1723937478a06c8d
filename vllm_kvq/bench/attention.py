"""Decode attention over packed pages and vLLM's own, side by side in one process.

Rules that make the ratios meaningful:

  * One step is one layer's attention of `--batch` requests with `--context` tokens each: vLLM reads its bf16 or fp8
    cache; we read packed pages, window and sinks, and merge (bench/steps.py).
  * Rounds are interleaved (bf16, fp8, ours, bf16, ...), and a ratio is the median over rounds of that round's
    ratio, so a slow moment of the machine affects all sides alike.
  * Each side cycles through caches that together exceed twice the processor's last-level cache, as the layers of a
    model do. With `--rotate 1` small contexts stay in the processor's cache, and every timing follows an untimed step.
  * If `best` is far below `ms`, other processes were using the processor: such a run says nothing.
  * Pages hold packed random data with outlier channels and tokens, in shuffled order.
  * $VLLM_KVQ_ISA=avx2 limits both sides to AVX2: ours, and vLLM's own build for it, which has no fp8 cache.
  * `of copy`: bytes per second, compared with a plain copy of memory in the same run with the same threads.
  * `limit`: how many times fewer bytes than bf16 a step reads, and so the ratio where only memory decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_kvq.bench.slow import Wanted
from vllm_kvq.bench.steps import Candidate, Shape, bound_format, kvq_candidate, vllm_candidate
from vllm_kvq.bench.timing import Row, compare
from vllm_kvq.bench.vllm_build import baselines, no_fp8
from vllm_kvq.formats.table import label
from vllm_kvq.kernels.cpu.slow import slow
from vllm_kvq.kernels.cpu.step import why_not


def notes(shape: Shape, formats: Wanted, baseline: bool) -> list[str]:
    """What is not served by the fast kernels here, or not compared."""
    found = []
    for name, options in formats:
        fmt = bound_format(shape, name, options)
        if problem := why_not(fmt):
            found.append(f"{problem}: the PyTorch kernels are timed")
        elif sentence := slow(fmt):
            found.append(sentence)
    if baseline and (problem := no_fp8(shape.head_size)):
        found.append(f"{problem}: ours is compared only with bf16")
    return found


def measure(
    shapes: Sequence[Shape], formats: Wanted, rounds: int, bandwidth: float, baseline: bool
) -> Iterator[tuple[Shape, list[Row]]]:
    """The rows of each shape, as they are measured; with `baseline` those of vLLM's caches come first."""
    for shape in shapes:
        candidates: dict[str, Candidate] = {}
        if baseline:
            candidates = {name: vllm_candidate(shape, dtype) for name, dtype in baselines(shape.head_size).items()}
        candidates |= {label(name, options): kvq_candidate(shape, name, options) for name, options in formats}
        yield shape, compare(candidates, rounds, bandwidth)

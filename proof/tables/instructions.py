"""Instructions that decode attention takes per cached element, counted and not timed.

    python -m proof instructions --formats all

Each kernel attends one KV head's tokens at two contexts on one thread, with the processor stopped after every
instruction; what the longer context takes in addition, divided by its additional elements (head size, keys and values),
is the cost of an element for all query heads of the group together. Only instructions of the kernel's own library
count.
x86-64 Linux.

On a processor with AVX-512 but without VNNI and VBMI, the kernels for those are counted with

    python -m proof probe -m proof instructions --no-baseline
"""

from __future__ import annotations

import argparse
import sys

import torch

from proof.kernels import probe
from vllm_kvq.bench.steps import Candidate, Shape, kvq_candidate, vllm_candidate
from vllm_kvq.bench.vllm_build import baselines
from vllm_kvq.cli.arguments import ALL, words
from vllm_kvq.formats import FORMATS, Geometry, get_format
from vllm_kvq.kernels.build import BuildError, build
from vllm_kvq.kernels.cpu.library import ISAS, isa, library

BLOCK = 128
CONTEXTS = (2048, 3072)
"""Multiples of a task's tokens, so that both are split alike."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof instructions", description=__doc__.partition("\n")[0]
    )
    public = [f.name for f in FORMATS.values() if f.public]
    p.add_argument("--formats", type=words([*public, ALL]), default=["squat2"], metavar="FORMAT,...")
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument("--queries-per-kv", type=int, default=4, help="query heads per KV head")
    p.add_argument("--no-baseline", action="store_true", help="count only ours, without vllm")
    args = p.parse_args(arguments)
    args.formats = public if ALL in args.formats else args.formats
    try:
        for name in args.formats:
            get_format(name).bind(Geometry(args.head_size, BLOCK, torch.bfloat16))
        shape_of(args, CONTEXTS[0])
    except ValueError as error:
        p.error(str(error))
    return args


def shape_of(args: argparse.Namespace, context: int) -> Shape:
    return Shape(context, 1, args.queries_per_kv, 1, args.head_size, BLOCK, 1)


def steps_of(name: str, shapes: dict[int, Shape]) -> dict[int, Candidate]:
    """With the same random numbers in every run: how often a maximum rises is part of the count."""
    torch.manual_seed(0)
    return {c: kvq_candidate(shape, name) for c, shape in shapes.items()}


def per_element(make: dict[int, Candidate], code: tuple[int, int], head_size: int) -> float:
    """`make`: one candidate per context."""
    counted = {}
    for context, candidate in make.items():
        step = candidate.steps[0]
        step()
        counted[context] = probe.count(step, code)
    (few, least), (many, most) = sorted(counted.items())
    return (most - least) / ((many - few) * 2 * head_size)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)
    if library() is None:
        print("no C++ kernels here (see the warning above): nothing to count", file=sys.stderr)
        return 1
    try:
        probe.library()
    except BuildError as error:
        print(str(error), file=sys.stderr)
        return 1
    shapes = {c: shape_of(args, c) for c in CONTEXTS}
    print(
        f"{ISAS[isa()]}, head size {args.head_size}, {args.queries_per_kv} query heads per KV head: "
        "instructions per cached element"
    )
    if not args.no_baseline:
        for name, dtype in baselines(args.head_size).items():
            made = {c: vllm_candidate(shape, dtype) for c, shape in shapes.items()}
            print(f"  {name:8} {per_element(made, probe.code_of('/vllm/_C'), args.head_size):7.3f}", flush=True)
    for name in args.formats:
        made = steps_of(name, shapes)
        code = probe.code_of(build().name)
        print(f"  {name:8} {per_element(made, code, args.head_size):7.3f}", flush=True)
    return 0

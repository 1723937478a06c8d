"""Compiles the Triton and CUDA kernels for every target without a GPU, and reads what the binaries need.

    python -m proof compile                      the table, as in docs/results/gpu-compile.md
    python -m proof compile --targets 90 --check  exit status 1 on a spill, without matrix instructions,
                                                               or with more instructions per element than its limit

A column of a target has registers, instructions per element of a kernel over pages, and the stack (where spilled
registers go) if there is any; `shared` and `matrix` (matrix instructions in the inner loop) are the most of all
targets.

Registers, shared memory and stack come from `cuobjdump -res-usage`, instructions from `nvdisasm`, both shipped with
Triton. The inner loop is the longest backward branch; its instructions are counted per
lane and per cached element: instructions * 32 lanes * warps / (tokens of a turn * head size * 2).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.tables import attended
from proof.tables.gpu import compile_cuda
from proof.tables.gpu.compile_cuda import CudaVariant
from proof.tables.gpu.sass import longest_loop, read_cubin, shortest_cycle
from vllm_kvq.cli.arguments import whole_numbers
from vllm_kvq.kernels.gpu import build as build_cuda

TARGETS = (80, 86, 89, 90, 100, 120)
MATRIX = re.compile(r"\b(HMMA|UTCHMMA|UTCQMMA|QGMMA|HGMMA|OMMA)")
COLUMNS = ("kernel", "warps", "shared", "matrix")

LIMIT = 3.0
"""Instructions per element on sm_90 that decode must not exceed at d = 128, up to 8 rows."""
LIMITS = {"kivi": 2.0, "polar": 4.5}
"""The same for key codecs with a limit of their own."""


def limit(kernel: str) -> float | None:
    """The most instructions per element that a kernel of this name may have; None: there is no limit."""
    found = re.fullmatch("attend ([a-z0-9_]+) d=128 rows=8", kernel)
    return None if found is None else LIMITS.get(attended.bound(found[1]).keys.name, LIMIT)


@dataclass(frozen=True)
class Variant:
    """One kernel as it is launched, with its constants."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, int]
    elements: int = 0
    """Cached elements per turn of the inner loop; 0: not a kernel over pages."""

    @property
    def warps(self) -> int:
        return self.options["num_warps"]

    @property
    def multiplies(self) -> bool:
        """Whether the matrix units have to be used."""
        return self.elements > 0


@dataclass(frozen=True)
class Usage:
    registers: int
    shared: int
    stack: int
    matrix: int
    loop: int


POINTERS = {
    "query_ptr": "*bf16",
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "side_ptr": "*bf16",
    "sink_ptr": "*bf16",
    "query_start_ptr": "*i32",
    "start_ptr": "*i32",
    "limit_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "side_table_ptr": "*i32",
    "sink_table_ptr": "*i32",
    "side_words_ptr": "*i32",
    "plan_ptr": "*i32",
    "faults_ptr": "*i32",
    "bytes_ptr": "*u8",
    "words_ptr": "*i32",
    "halves_ptr": "*fp16",
    "table_ptr": "*i32",
    "ids_ptr": "*i32",
    "low_ptr": "*i32",
    "high_ptr": "*i32",
    "scale": "fp32",
    "cap": "fp32",
    "places_ptr": "*i32",
}
"""The types of arguments that are neither constants nor (by the suffix _ptr) float32 nor i32."""

ALIGNED: tuple[str, ...] = ("query_request", "query_token", "query_head", "page_words", "head_words")
ALIGNED += ("key_token", "key_head", "value_token", "value_head")
ALIGNED += ("side_words", "side_elements", "sink_elements")
"""Strides that are multiples of 16 in every cache, in addition to all pointers."""


def attend_variants(target: int) -> Iterator[Variant]:
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.launch import MIN_ROWS
    from vllm_kvq.kernels.gpu.triton.layout import attend_launch, most_rows
    from vllm_kvq.kernels.gpu.triton.layout import constants as layout
    from vllm_kvq.triton_kernels.attend import attend_kernel

    triton = attended.by_triton()
    for name in (kernel for kernel in attended.shared() if kernel in triton):
        for d in (64, 128, 256):
            fmt = get_format(name).bind(Geometry(d, 64))
            k = layout(fmt)
            assert k is not None
            # up to 8 query heads per KV head; more, drafts, or a chunk of a prompt
            for rows in sorted({MIN_ROWS, most_rows(fmt)}):
                launch = attend_launch(fmt, rows, target)
                constants = k | {"SHARE": 4, "M": rows, "LISTED": False, "RAGGED": True, "CAPPED": False}
                yield Variant(
                    f"attend {name} d={d} rows={rows}",
                    attend_kernel,
                    constants | {"TURN": launch.turn, "EXTRA": launch.extra},
                    launch.options,
                    64 * d * launch.turn,
                )


def unpack_variants() -> Iterator[Variant]:
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.launch import unpack_launch
    from vllm_kvq.kernels.gpu.triton.layout import constants
    from vllm_kvq.triton_kernels.unpack import unpack_kernel

    triton = attended.by_triton()
    for name in (kernel for kernel in attended.shared() if kernel in triton):
        for d in (64, 128, 256):
            fmt = get_format(name).bind(Geometry(d, 64))
            yield Variant(f"unpack {name} d={d}", unpack_kernel, constants(fmt) or {}, unpack_launch(fmt).options)


def merge_variants() -> Iterator[Variant]:
    from vllm_kvq.kernels.gpu.launch import merge_launch
    from vllm_kvq.triton_kernels.merge import merge_kernel

    for parts in (8, 128):
        sizes = {"HEAD": 128, "COLUMNS": 128, "PARTS": parts, "LIMITED": 32}
        yield Variant(f"merge d=128 parts={parts}", merge_kernel, sizes, merge_launch(parts).options)


def step_variants(target: int) -> Iterator[Variant]:
    """All other kernels of a layer's step, at 8 KV heads of 4 query heads each, with 2 drafts."""
    import torch

    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.launch import SLOT_LAUNCH, full_precision_launch
    from vllm_kvq.kernels.gpu.step import GPUStep
    from vllm_kvq.kernels.gpu.triton.layout import pack_constants, pack_launch
    from vllm_kvq.kernels.slots import SlotGeometry
    from vllm_kvq.triton_kernels.full_precision import full_precision_kernel
    from vllm_kvq.triton_kernels.packing.kernel import pack_kernel
    from vllm_kvq.triton_kernels.step import begin_kernel, commit_kernel

    one_per_state, most_sinks = attended.one_per_state(), attended.most_sinks()
    for name in attended.by_triton():
        for d in (64, 128, 256):
            fmt = get_format(name).bind(Geometry(d, 64))
            slots = SlotGeometry.of(fmt, 8, 2)
            step = GPUStep(fmt, slots, 2, 1.0, torch.device("cpu"))
            packing = pack_constants(fmt, slots)
            yield Variant(f"pack {name} d={d}", pack_kernel, packing, pack_launch(fmt, target).options)
            if d != 128 and name != most_sinks:
                continue
            if name in one_per_state:
                yield Variant(f"begin {name} d={d}", begin_kernel, step.begin_constants(4), SLOT_LAUNCH.options)
            if name == most_sinks:
                yield Variant(f"commit d={d}", commit_kernel, step.commit_constants(16), SLOT_LAUNCH.options)
                for rows, use in ((4, "decode"), (256, "prompt")):
                    sizes, options = step.full_precision_constants(4, rows), full_precision_launch(fmt).options
                    yield Variant(f"{use} in full precision d={d}", full_precision_kernel, sizes, options)


def variants(target: int) -> list[Variant]:
    return [*attend_variants(target), *unpack_variants(), *merge_variants(), *step_variants(target)]


def build(variant: Variant, target: int) -> Any:
    """The compiled kernel (`asm`, `metadata`), as a launch on such a device would make it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    if not hasattr(kernel, "arg_names") or os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("compiling needs TRITON_INTERPRET unset")
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = POINTERS.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        if (
            name == "query_ptr" and "K" in variant.constants and variant.constants["K"].transformed
        ):  # transformed queries
            signature[name] = "*fp32"
        if name.endswith("_ptr") or name in ALIGNED:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, variant.constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=variant.options)


def read(compiled: Any) -> tuple[int, int, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return read_cubin(file.name)


def inner_loop(compiled: Any) -> list[str]:
    """The instructions of a kernel's inner loop."""
    return longest_loop(read(compiled)[2])


def usage(compiled: Any) -> Usage:
    registers, stack, sass = read(compiled)
    loop = longest_loop(sass)
    return Usage(registers, compiled.metadata.shared, stack, sum(bool(MATRIX.search(i)) for i in loop), len(loop))


def cuda_usage(variant: CudaVariant, target: int) -> Usage:
    with tempfile.TemporaryDirectory() as directory:
        registers, stack, sass = read_cubin(str(compile_cuda.build(variant, target, Path(directory))))
    loop = shortest_cycle(sass) if variant.attends else []
    return Usage(registers, variant.shared, stack, sum(bool(MATRIX.search(i)) for i in loop), len(loop))


def line(cells: Iterable[object], targets: int) -> None:
    print(("| {:<33} | {:>5} | {:>6} | {:>6} |" + " {:>9} |" * targets).format(*cells), flush=True)


def report(targets: list[int], only: list[str]) -> bool:
    """Prints the Triton kernels' rows; whether every kernel is without spills and every loop over pages multiplies."""
    good = True
    for same in zip(*(variants(target) for target in targets), strict=True):
        variant = same[0]
        if any(part in variant.name for part in only):
            used = {target: usage(build(v, target)) for target, v in zip(targets, same, strict=True)}
            per = {t: 32 * v.warps / v.elements for t, v in zip(targets, same, strict=True) if v.elements}
            warps = "/".join(str(n) for n in dict.fromkeys(v.warps for v in same))
            good &= row(variant.name, warps, used, per, variant.multiplies)
    return good


def row(name: str, warps: str, used: dict[int, Usage], scale: dict[int, float], multiplies: bool) -> bool:
    """Prints a row; whether it is as it should be. `scale` turns a target's instructions into those per element."""
    cells, good = [], True
    for target, u in used.items():
        per = u.loop * scale[target] if target in scale else None
        cells.append(f"{u.registers}" if per is None else f"{u.registers}, {per:.2f}")
        if u.stack:
            cells[-1] += f", stack {u.stack}"
        most = limit(name) if target == 90 else None
        few = per is None or most is None or per <= most
        good &= u.stack == 0 and (u.matrix > 0 or not multiplies) and few
    largest = [max(getattr(u, field) for u in used.values()) for field in ("shared", "matrix")]
    line((name, warps, *largest, *cells), len(used))
    return good


def report_cuda(targets: list[int], only: list[str]) -> bool:
    """The rows of csrc/cuda; none, with a word on stderr, where there is no nvcc."""
    if build_cuda.nvcc() is None:
        print("no nvcc: without the rows of the CUDA kernels", file=sys.stderr)
        return True
    good = True
    for variant in compile_cuda.variants():
        if any(part in variant.name for part in only):
            used = {target: cuda_usage(variant, target) for target in targets}
            # a warp takes a slab of 32 tokens per turn
            per = {target: 1 / (2 * variant.head_size) for target in targets if variant.attends}
            good &= row(variant.name, str(variant.warps), used, per, variant.attends)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--targets", type=whole_numbers, default=list(TARGETS), metavar="N,...", help="compute capabilities, as in 90"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[""],
        metavar="TEXT,...",
        help="variants whose name contains one of these",
    )
    parser.add_argument("--without-cuda", action="store_true", help="leave out what nvcc compiles")
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail on a spill, a loop over pages without matrix products or above its limit",
    )
    args = parser.parse_args(argv)
    line([*COLUMNS, *(f"sm_{target}" for target in args.targets)], len(args.targets))
    line(["---", *["--:"] * (len(COLUMNS) - 1 + len(args.targets))], len(args.targets))
    good = report(args.targets, args.only)
    if not args.without_cuda:
        good &= report_cuda(args.targets, args.only)
    return 1 if args.check and not good else 0

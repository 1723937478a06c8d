"""Faults in the kernels for AMX, which tests emulate."""

from __future__ import annotations

from proof.mutants.fault import Fault

AMX = "csrc/cpu/attend/amx"
TESTS = "tests/kernels/cpu/test_tiles.py"

FAULTS: tuple[Fault, ...] = tuple(
    Fault(name, file, before, after, TESTS, slow=True)
    for name, file, before, after in (
        (
            "tiles: what is not attended keeps its values",
            f"{AMX}/factors.h",
            "slab.low <= t && t < slab.high ?",
            "true ?",
        ),
        (
            "tiles: a pair has its tokens in the wrong order",
            f"{AMX}/factors.h",
            "row(t, c), row(t + 1, c)",
            "row(t + 1, c), row(t, c)",
        ),
        ("tiles: the last rows have the shape of all", f"{AMX}/many.h", "part.rows < TOGETHER)", "part.rows < 0)"),
        (
            "tiles: the second rows get the weights of the first",
            f"{AMX}/many.h",
            "work.weights + TILE_ROWS * BLOCK + s",
            "work.weights + s",
        ),
        ("tiles: the scale is applied again after the cap", f"{AMX}/many.h", "task.unit = 1;", ""),
        ("tiles: the matrix has one half", f"{AMX}/transformed.h", "half < 2", "half < 1"),
        (
            "tiles: transformed keys without their mean",
            f"{AMX}/transformed.h",
            "load(scale + t) + mean[c]",
            "load(scale + t)",
        ),
        (
            "tiles: queries in float16 are taken for bf16",
            "csrc/cpu/dispatch/isa.h",
            "query == Dtype::bf16 &&",
            "query != Dtype::f32 &&",
        ),
        ("tiles: queries come with the scale", "csrc/cpu/library/amx.cpp", "amx::many, false", "amx::many, true"),
    )
)

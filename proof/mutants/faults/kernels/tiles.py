"""Faults in the kernels for AMX, whose tiles the tests emulate."""

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
        (
            "tiles of bytes: keys are left to other kernels",
            "csrc/cpu/dispatch/isa.h",
            "if (has_byte_tiles(level)) return amx_few.keys(l, rows);",
            "",
        ),
        (
            "tiles of bytes: no shape where only values have tiles",
            "csrc/cpu/attend/attend.cpp",
            "keys.tiles || values.tiles",
            "keys.tiles",
        ),
        ("tiles of bytes: a left tile has lines for four rows", f"{AMX}/few.h", "rows > 4 ?", "rows > 8 ?"),
        (
            "tiles of bytes: the second left tile is the first",
            f"{AMX}/few.h",
            "left_bytes + TILE_ROWS * stride + k",
            "left_bytes + k",
        ),
        (
            "tiles of bytes: the low bytes are those of the next row",
            f"{AMX}/few.h",
            "L::load_bytes(hi + 4 * TILE_ROWS)",
            "L::load_bytes(hi + 5 * TILE_ROWS)",
        ),
        ("tiles of bytes: the first slab has no scores", f"{AMX}/few.h", "if (i) finish(i - 1);", "if (i) finish(i);"),
        (
            "tiles of bytes: a slab has the offsets of another one",
            f"{AMX}/folded_keys.h",
            "offset = L::all(work.offset[s][row])",
            "offset = L::all(work.offset[s / 2][row])",
        ),
        (
            "tiles of bytes: runs of digits share a tile",
            f"{AMX}/digit_keys.h",
            "codes.at += tiles_of(digits, k) * TILE;",
            "codes.at += (tiles_of(digits, k) - 1) * TILE;",
        ),
        (
            "tiles of bytes: a digit's numbers lie by planes",
            f"{AMX}/digit_keys.h",
            "PLANES * (i / 4 - digits.runs[k].first) + plane",
            "words_of(digits, k) * plane + i / 4 - digits.runs[k].first",
        ),
        (
            "tiles of bytes: all groups have the weights of the first",
            f"{AMX}/token_values.h",
            "work.weights[i / of_group % 2]",
            "work.weights[0]",
        ),
        (
            "tiles of bytes: half of the channels come from the wrong plane",
            f"{AMX}/token_values.h",
            "L::all32(first / stride * LOW)",
            "L::all32(c / stride * LOW)",
        ),
        (
            "tiles of bytes: third bits come from the wrong plane",
            f"{AMX}/token_values.h",
            "L::planes(first, high_stride, 1)",
            "L::planes(c, high_stride, 1)",
        ),
        (
            "tiles of halves: both have the even ones",
            f"{AMX}/halves.h",
            "_mm512_maskz_mov_epi32(__mmask16(~LOW), x)",
            "_mm512_maskz_mov_epi32(LOW, x)",
        ),
        (
            "tiles of halves: the shape is for whole rows",
            f"{AMX}/table.h",
            "halves ? rows_of_halves(rows) : rows",
            "rows",
        ),
        (
            "tiles of halves: InnerQ's norm is the first page's",
            f"{AMX}/hybrid_keys.h",
            "if (!task.prepared || !prepared(first))",
            "if (!task.prepared)",
        ),
        (
            "tiles of halves: a block has one norm",
            f"{AMX}/hybrid_keys.h",
            "(slabs[last].page == slabs[first].page || prepared(last))",
            "true",
        ),
        (
            "tiles of halves: a slab has the sums of the other one",
            f"{AMX}/hybrid_values.h",
            "row_of_half(row, s % 2)",
            "row_of_half(row, 1 - s % 2)",
        ),
        (
            "tiles of bytes: what is not attended has a scale",
            "csrc/cpu/attend/vnni/token_weights.h",
            "_mm512_maskz_cvtph_ps(attended,",
            "_mm512_maskz_cvtph_ps(0xFFFF,",
        ),
    )
)

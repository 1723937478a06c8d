"""Faults in the Triton kernels of transform coding, and in the tables that they read."""

from __future__ import annotations

from proof.mutants.fault import Fault

TRITON = "tests/triton"
KEYS = "triton_kernels/keys_transformed.py"
PACKING = "triton_kernels/pack_searched.py"
TABLES = "vllm_kvq/kernels/gpu/transformed.py"
ATTEND = f"{TRITON}/test_attend.py -k klt3-64"
HEADS = f"{TRITON}/test_attend.py -k constants_of"
PACK = f"{TRITON}/test_pack_tile.py -k klt3-64"
SLOTS = f"{TRITON}/test_pack_tile.py -k klt4-80"
UNPACK = f"{TRITON}/test_unpack.py -k klt3-80"


def _fault(name: str, file: str, code: str, fault: str, tests: str) -> Fault:
    return Fault(f"GPU, transformed: {name}", file, code, fault, tests)


FAULTS: tuple[Fault, ...] = (
    _fault(
        "scores without the mean", KEYS, "fragment_rows(scale, M) + mean[None, :]", "fragment_rows(scale, M)", ATTEND
    ),
    _fault("the middle of two codes", KEYS, "(-1.5 / SUBNORMAL)", "(-1.0 / SUBNORMAL)", ATTEND),
    _fault("the middle of the first plane's codes", KEYS, "* (1 << BITS * p)", "* (1 << 0 * p)", ATTEND),
    _fault(
        "a slab has the scales of the first", KEYS, "j * SLAB_WORDS * 2 + SCALE", "0 * SLAB_WORDS * 2 + SCALE", HEADS
    ),
    _fault(
        "the highest bits are worth the same in all planes",
        "triton_kernels/values.py",
        "return 1 << bits + channel // (d * bits // 8) * bits - channel // (d // 8)",
        "return 1 << bits",
        ATTEND,
    ),
    _fault("another number of heads is served", TABLES, "if len(made.places) != heads:", "if not heads:", HEADS),
    _fault(
        "queries of a head go to the next",
        TABLES,
        "by_head.flatten(1, -2) @",
        "by_head.flatten(1, -2).flip(0) @",
        HEADS,
    ),
    _fault("the first scale that is tried", PACKING, "better = error < least", "better = least > 3.0e38", PACK),
    _fault("all channels weigh the same", PACKING, "row_sum(off * off * weight[None, :])", "row_sum(off * off)", PACK),
    _fault("keys as they are", PACKING, "clean(raw) - tl.load(table + row)[None, :]", "clean(raw)", PACK),
    _fault(
        "digits of the lowest place",
        PACKING,
        "((slot & ((1 << BITS) - 1)) * BITS)[None",
        "((slot & 0) * BITS)[None",
        PACK,
    ),
    _fault(
        "all heads have the slots of the first",
        "triton_kernels/pack.py",
        "places_ptr + head * SLOTS",
        "places_ptr + head * 0",
        SLOTS,
    ),
    _fault(
        "all heads are transformed back as the first",
        "triton_kernels/unpack.py",
        "back_ptr + head * ((SLOTS + 1) * D)",
        "back_ptr + head * 0",
        UNPACK,
    ),
    _fault(
        "values without their middle",
        "triton_kernels/unpack.py",
        "value = (zero * MIDDLE + scale",
        "value = (zero * 0.0 + scale",
        UNPACK,
    ),
)

"""Faults in the Triton kernels of transform coding, and in the tables that they read."""

from __future__ import annotations

from proof.mutants.fault import Fault

TRITON = "tests/triton"
KEYS = "triton_kernels/keys/transformed.py"
TURNING = "triton_kernels/turning.py"
PACKING = "triton_kernels/packing/searched.py"
TABLES = "vllm_kvq/kernels/gpu/triton/transformed.py"
ATTEND = f"{TRITON}/test_attend.py -k klt3-64"
FAR = f"{TRITON}/test_attend.py -k wherever"
MANY = f"{TRITON}/test_attend.py -k more_slabs"
ATTENTION = "triton_kernels/attend.py::attend_kernel"
HEADS = f"{TRITON}/test_attend.py -k constants_of"
PACK = f"{TRITON}/test_pack_tile.py -k klt3-64"
SLOTS = f"{TRITON}/test_pack_tile.py -k klt4-80"
UNPACK = f"{TRITON}/test_unpack.py -k klt3-80"


def _fault(name: str, file: str, code: str, fault: str, tests: str) -> Fault:
    return Fault(f"GPU, transformed: {name}", file, code, fault, tests)


FAULTS: tuple[Fault, ...] = (
    _fault("scores without the mean", f"{KEYS}::transformed_scores", "+ of_slab[None, :]", "", ATTEND),
    _fault("a page's slabs have the mean of its first", f"{KEYS}::transformed_scores", "first + j", "first", FAR),
    _fault("the first slabs' means serve for all", ATTENTION, "if place == 0", "if i == begin", MANY),
    _fault(
        "means of the slabs at the beginning",
        ATTENTION,
        "ahead = i + tl.arange(0, AHEAD) // TURN",
        "ahead = begin + tl.arange(0, AHEAD) // TURN",
        MANY,
    ),
    _fault("means of the first page's slabs", ATTENTION, "+ ahead // turns,", "+ i // turns + ahead * 0,", MANY),
    _fault("half of what a mean adds", f"{KEYS}::scores_of_means", "_precise_dot(sin, y,", "(", FAR),
    _fault("means of the first eight pairs", f"{KEYS}::scores_of_means", "range(0, pairs, 8)", "range(0, 8, 8)", FAR),
    _fault("products of 11 bits", f"{KEYS}::_precise_dot", "tl.dot(a, b, total", "tl.dot(a, b, total * 0.0", MANY),
    _fault("means do not turn", f"{TURNING}::turned", "n % FINE", "0", FAR),
    _fault("means turn within the first slabs only", f"{TURNING}::turned", "n // FINE % COARSE", "0", FAR),
    _fault("means turn the other way", f"{TURNING}::turned", "c * x - s * y, s * x", "c * x + s * y, s * x", FAR),
    _fault(
        "a page does not tell where it is",
        "triton_kernels/packing/kernel.py::pack_kernel",
        "1, place * (R.slabs * 32)",
        "1, place * 0",
        PACK,
    ),
    _fault("all slabs have the mean of the first", f"{PACKING}::transformed_keys", "number, row", "0, row", PACK),
    _fault("the middle of two codes", f"{KEYS}::transformed_middle", "5", "0", ATTEND),
    _fault("the middle of the first plane's codes", f"{KEYS}::transformed_middle", "< K.bits", "< 0", ATTEND),
    _fault(
        "a slab has the scales of the first",
        f"{KEYS}::transformed_scores",
        "j * R.slab_words + K.scale",
        "0 * R.slab_words + K.scale",
        HEADS,
    ),
    _fault(
        "the highest bits are worth the same in all planes",
        "triton_kernels/values.py::_high_factor",
        "+ channel // (d * bits // 8) * bits - channel // (d // 8)",
        "",
        ATTEND,
    ),
    _fault("another number of heads is served", f"{TABLES}::tables", "len(made.places) !=", "not", HEADS),
    _fault(
        "queries of a head go to the next",
        f"{TABLES}::features",
        "(1, -2)",
        "(1, -2).flip(0)",
        HEADS,
    ),
    _fault(
        "the first scale that is tried",
        f"{PACKING}::_searched",
        "better = error < least",
        "better = least > 3.0e38",
        PACK,
    ),
    _fault(
        "the first scale around a number", f"{PACKING}::_searched", "error < least, first + i", "error < 0, byte", PACK
    ),
    _fault("all channels weigh the same", f"{PACKING}::_error", "off * weight[None, :]", "off", PACK),
    _fault(
        "the last tokens' values have the scales of the first",
        "triton_kernels/values.py::token_values",
        "V.scale + 4 + quad",
        "V.scale + quad",
        ATTEND,
    ),
    _fault("scales fit whatever the weights", f"{PACKING}::_searched", "level * weight[None, :]", "level", PACK),
    _fault("keys as they are", f"{PACKING}::transformed_keys", "- mean[None, :]", "", PACK),
    _fault(
        "digits of the lowest place",
        f"{PACKING}::transformed_keys",
        "slot & ((1 << K.bits) - 1)",
        "slot & 0",
        PACK,
    ),
    _fault(
        "all heads have the slots of the first",
        "triton_kernels/packing/kernel.py::pack_kernel",
        "* K.slots",
        "* 0",
        SLOTS,
    ),
    _fault(
        "all heads are transformed back as the first",
        "triton_kernels/unpack.py::unpack_kernel",
        "((K.slots + R.d) * R.d)",
        "0",
        UNPACK,
    ),
    _fault(
        "values without their middle",
        "triton_kernels/unpack.py::_token_values",
        "* V.middle",
        "* 0.0",
        UNPACK,
    ),
)

"""Small device functions that all kernels share.

The kernels call only builtins of `triton.language` (never `tl.sum`, `tl.zeros`, ..., which are themselves jit
functions): this way the interpreter can be switched on for only these modules, whatever imported Triton before.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from vllm_kvq.formats import page
from vllm_kvq.formats.parts import quant

MAGIC: tl.constexpr = tl.constexpr(page.MAGIC)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
SUBNORMAL: tl.constexpr = tl.constexpr(16777216.0)  # 2^24
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LIMIT: tl.constexpr = tl.constexpr(quant.LIMIT)
TINY: tl.constexpr = tl.constexpr(2.0**-24)
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to even
INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def cos_sin(x):
    """Uses the special function unit, with errors of 2^-20 between -2 pi and 2 pi: less than float16 operands resolve.

    The precise library functions, and polynomials, take many times as many instructions.
    """
    if INTERPRETED:  # does not support assembly
        return tl.cos(x), tl.sin(x)
    else:
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return cos, tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def capped(x, cap):
    """cap tanh(x / cap), by tanh y = 1 - 2 / (e^2y + 1), which is also correct if e^2y is 0 or infinite."""
    return cap - 2 * cap / (tl.exp2(x * (2 * LOG2E / cap)) + 1)


@triton.jit
def product(x, y):
    """x * y of float16, two products in one instruction: on its own, the compiler computes one at a time."""
    if INTERPRETED:
        return x * y
    else:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.float16, True, 2)


@triton.jit
def row_max(x):
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def row_sum(x):
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def column_max(x):
    return tl.reduce(x, 0, tl.standard._elementwise_max)


@triton.jit
def column_sum(x):
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def clean(x):
    """Finite float32 within +-LIMIT, as formats/parts/quant.py's `sanitize`."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def lost(x):
    """The number of elements of (T, C) that `clean` replaces."""
    bad = ((x == x) & (tl.abs(x) <= LIMIT)) == 0
    return tl.reduce(tl.reduce(bad.to(tl.int32), 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)


@triton.jit
def load_some(at, index, COUNT: tl.constexpr, ALL: tl.constexpr):
    """The value at an address if its index is below COUNT of ALL, else 0."""
    if COUNT == ALL:
        return tl.load(at)
    else:
        return tl.load(at, mask=index < COUNT, other=0)

"""CPU kernels in C++ (csrc/cpu), with the PyTorch kernels' contract.

    attend_packed(fmt, query, pages, page_ids, owner, low, high, scale) -> (out, lse)

The library is built and loaded at the first call. Where that fails (no compiler), one warning is logged, and the
PyTorch path serves whole steps instead (kernels/paths.py). $VLLM_KVQ_ISA = portable | avx2 | avx512bw | avx512 lowers
the instruction set, for tests.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.innerq import HybridKeys, HybridValues
from vllm_kvq.formats.lossless import RawKeys
from vllm_kvq.formats.polar import PaperPolarKeys, PolarKeys
from vllm_kvq.formats.qjl import SketchKeys
from vllm_kvq.formats.squat import ChannelKeys
from vllm_kvq.formats.values import RawValues, TokenValues
from vllm_kvq.kernels.build import BuildError, load
from vllm_kvq.kernels.torch.attend import Partial
from vllm_kvq.kernels.torch.pack import Pair

logger = logging.getLogger(__name__)

ISAS = ("portable", "avx2", "avx512bw", "avx512")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# kinds and field names in the order of csrc/cpu/layout.h
_CHANNEL, _HYBRID, _SKETCH, _POLAR, _RAW = range(5)
_TOKEN, _HYBRID_VALUES, _RAW_VALUES = range(3)


@dataclass(frozen=True)
class Bound:
    """A format as the library wants it: see `Layout` and `Constants` in csrc/cpu/layout.h."""

    layout: torch.Tensor
    constants: torch.Tensor
    pairs: torch.Tensor


def _key_fields(fmt: PageFormat) -> tuple[dict[str, int], tuple[str, ...]] | None:
    """What the layout says of the keys, and their slab fields in the library's order."""
    k = fmt.keys
    if isinstance(k, ChannelKeys):
        return {"keys": _CHANNEL, "key_bits": k.bits}, ("k_codes", "k_scale", "k_zero")
    if isinstance(k, HybridKeys):
        return {"keys": _HYBRID, "key_bits": k.bits}, ("k_codes", "k_scale", "k_slot")
    if isinstance(k, SketchKeys):
        kind = {"keys": _SKETCH, "key_bits": 1, "sketch_rows": k.m, "outer_rows": k.m_out, "outliers": k.n}
        return kind, (
            "k_bits",
            "k_norm",
            "ko_bits",
            "ko_norm",
            "ko_index",
        )
    if isinstance(k, PolarKeys):
        kind = {
            "keys": _POLAR,
            "key_bits": k.m,
            "radius_bits": k.n,
            "paper": int(isinstance(k, PaperPolarKeys)),
        }
        return kind, ("k_polar",) if k.nibbles else ("k_angle", "k_radius")
    if isinstance(k, RawKeys):
        return {"keys": _RAW}, ("k_raw",)
    return None


def _value_fields(fmt: PageFormat) -> tuple[dict[str, int], tuple[str, ...]] | None:
    v = fmt.values
    if isinstance(v, TokenValues):
        return {"values": _TOKEN, "value_bits": v.bits, "group": v.group}, ("v_codes", "v_scale", "v_zero")
    if isinstance(v, HybridValues):
        return {"values": _HYBRID_VALUES, "value_bits": v.bits}, ("v_codes", "v_scale", "v_slot")
    if isinstance(v, RawValues):
        return {"values": _RAW_VALUES}, ("v_raw",)
    return None


def _bind(fmt: PageFormat) -> Bound | None:
    """None for a codec that the library does not know: then the PyTorch kernels serve it."""
    keys, values = _key_fields(fmt), _value_fields(fmt)
    if keys is None or values is None:
        return None
    slab, page = fmt.slab_region, fmt.page_region
    sizes = dict.fromkeys(("key_bits", "radius_bits", "paper", "sketch_rows", "outer_rows", "outliers"), 0)
    sizes |= dict.fromkeys(("value_bits", "group"), 0) | keys[0] | values[0]

    def padded(offsets: list[int], length: int) -> list[int]:
        return offsets + [0] * (length - len(offsets))

    layout = [
        *(fmt.geometry.head_size, fmt.geometry.d, fmt.N, fmt.record_bytes, fmt.slabs_at, slab.nbytes),
        *(sizes[n] for n in ("keys", "key_bits", "radius_bits", "paper", "sketch_rows", "outer_rows", "outliers")),
        *(sizes[n] for n in ("values", "value_bits", "group")),
        FLOATS.index(fmt.geometry.dtype),
        *padded([slab.offset(n) for n in keys[1]], 5),
        *padded([fmt.slabs_at - page.nbytes + o for o in page.offsets], 4),
        *padded([slab.offset(n) for n in values[1]], 3),
    ]
    constants, pairs = torch.zeros(0, dtype=torch.float32), torch.zeros(0, dtype=torch.int32)
    if isinstance(fmt.keys, SketchKeys):
        cpu = torch.device("cpu")
        scales = torch.tensor([fmt.keys.scale, fmt.keys.scale_out], dtype=torch.float32)
        sketches = torch.cat([s.T.flatten() for s in (fmt.keys.sketch(cpu), fmt.keys.sketch_out(cpu))])
        constants = torch.cat([scales, sketches])
    if isinstance(fmt.keys, PolarKeys):
        pairs = torch.stack([fmt.keys.x, fmt.keys.y]).to(torch.int32)
    return Bound(torch.tensor(layout), constants, pairs)


# by identity, with the format held so that its id stays its own: hashing all settings would cost more than a
# call
_bound: dict[int, tuple[PageFormat, Bound | None]] = {}


def bind(fmt: PageFormat) -> Bound | None:
    found = _bound.get(id(fmt))
    if found is None:
        found = _bound[id(fmt)] = (fmt, _bind(fmt))
    return found[1]


@functools.cache
def library() -> Any | None:
    """The loaded library, None (after one warning) where it can't be had."""
    try:
        return load()
    except BuildError as error:
        reason = str(error).strip().splitlines()[-1]
        logger.warning("vllm_kvq: no C++ kernels, using the slower PyTorch ones: %s", reason)
        return None


@functools.cache
def isa() -> int:
    """The instruction set in use, as an index into ISAS."""
    lib = library()
    best = int(lib.best_isa()) if lib is not None else 0
    wanted = os.environ.get("VLLM_KVQ_ISA", "")
    if wanted and wanted not in ISAS:
        raise ValueError(f"VLLM_KVQ_ISA is {wanted!r}; it takes one of {', '.join(ISAS)}")
    return min(best, ISAS.index(wanted)) if wanted else best


def supports(fmt: PageFormat) -> bool:
    """Whether `attend_packed` runs in C++ for this format."""
    return bind(fmt) is not None and library() is not None


def bound_to(fmt: PageFormat) -> tuple[Any, Any]:
    """The format as the library wants it, and the library."""
    bound, lib = bind(fmt), library()
    if bound is None or lib is None:
        raise ValueError(f"{fmt.name} has no C++ kernels here; the PyTorch kernels serve it")
    return bound, lib


def attend_packed(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    owner: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
) -> Partial:
    """n requests with q queries each over their packed tokens; see `attend.attend_packed`.

    query (n, q, Hq, head_size) of any float type and with any outer strides, pages (B, H, record_bytes) with
    any outer strides. IndexError for a page id or an owner out of range.
    """
    bound, lib = bound_to(fmt)
    if query.stride(-1) != 1:
        query = query.contiguous()
    lists = (x.to(torch.int64).contiguous() for x in (page_ids, owner, low, high))
    n, q, heads, head_size = query.shape
    out, lse = torch.empty(n, q, heads, head_size), torch.empty(n, q, heads)
    tables = (bound.layout, bound.constants, bound.pairs)
    lib.attend_packed(*tables, query, pages, *lists, scale, out, lse, torch.get_num_threads(), isa())
    return out, lse


def all_packed(
    fmt: PageFormat, pages: torch.Tensor, page_ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> bool:
    bound, lib = bound_to(fmt)
    return lib.unpacked_page(bound.layout, pages, page_ids, low, high) < 0


_NONE = torch.zeros(0, dtype=torch.float32)
_NO_PART = (_NONE, _NONE)


def attend_raw(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> Partial:
    """`attend.attend_raw`, with any outer strides; a token that no query sees is not read.

    query (n, q, Hq, d), key and value (n, t, H, d), seen (n, q, t) booleans.
    """
    n, q, heads, d = query.shape
    out, lse = torch.empty(n * q, heads, d), torch.empty(n, q, heads)
    rows = torch.arange(n * key.shape[1]).view(n, -1)
    _raw(library(), out, torch.arange(n * q), lse, query, (key, value), (key[:0], value[:0]), rows, seen, scale, [])
    return out.view(n, q, heads, d), lse


def attend_into(
    output: torch.Tensor,
    output_rows: torch.Tensor,
    query: torch.Tensor,
    pool: Pair,
    more: Pair,
    rows: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    parts: list[Partial],
) -> None:
    """`attend.attend_into` without copies, for at most two other parts. IndexError for a row beyond its tensor."""
    _raw(library(), output, output_rows, _NONE, query, pool, more, rows, seen, scale, parts)


def attend_step(
    fmt: PageFormat,
    output: torch.Tensor,
    output_rows: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    owner: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    pool: Pair,
    more: Pair,
    rows: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
) -> bool:
    """`attend.attend_step` in one call and one parallel loop. IndexError as in `attend_packed` and `attend_into`."""
    bound, lib = bound_to(fmt)
    if query.stride(-1) != 1:
        query = query.contiguous()
    # no loops: at short contexts a step costs what its call costs
    return (
        lib.attend_step(
            *(bound.layout, bound.constants, bound.pairs, query, pages, page_ids, owner, low, high),
            *(*pool, *more, rows, seen.contiguous().view(torch.uint8), scale),
            *(output, output_rows, torch.get_num_threads(), isa()),
        )
        < 0
    )


def _raw(
    lib: Any,
    output: torch.Tensor,
    output_rows: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    pool: Pair,
    more: Pair,
    rows: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    parts: list[Partial],
) -> None:
    if len(parts) > 2:
        raise ValueError(f"{len(parts)} other parts; the library merges at most 2")
    query, *tokens = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, *pool, *more))
    first, second = (*parts, _NO_PART, _NO_PART)[:2]
    at = (output, output_rows, lse, torch.get_num_threads(), isa())
    lib.attend_raw(query, *tokens, rows, seen.contiguous().view(torch.uint8), scale, *first, *second, *at)

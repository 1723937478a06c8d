"""CUDA kernels for QJL (csrc/cuda), with the PyTorch kernels' contract.

    attend_packed(fmt, query, pages, page_ids, owner, low, high, scale) -> (out, lse)   a list of pages, as on the CPU
    attend_table(fmt, query, pages, table, low, high, scale) -> (out, lse)              block table, nothing on the host
    launch_attend(...), merge_parts(...)                                                into tensors of the caller
    pack(fmt, pages, page, slab, rows, key, value, state)                               32-token slabs

No GPU has run them yet. They are compiled for sm_80 to sm_120, and the same source runs on CPU tensors lane by lane
(csrc/cuda/emulate.h): CPU tensors here mean that emulation, which is for tests. Every launch takes its sizes from
shapes and its lengths from the device, so a CUDA graph may keep it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.qjl import SketchKeys
from vllm_kvq.formats.values import TokenValues
from vllm_kvq.kernels import build_cuda
from vllm_kvq.kernels.attend import Partial
from vllm_kvq.kernels.build import BuildError

HEAD_SIZES = (64, 128, 256)
PROGRAMS_PER_PROCESSOR = 4
MAX_SPLITS = 128
WORKSPACE_BYTES = 256 << 20
"""A long chunk is attended in pieces whose workspace fits this."""


@dataclass(frozen=True)
class Bound:
    """A format as the library wants it: its layout, and the sketches transposed on the pages' device."""

    layout: torch.Tensor
    inner: torch.Tensor
    outer: torch.Tensor
    scale_inner: float
    scale_outer: float


def why_not(fmt: PageFormat) -> str | None:
    """One sentence if the kernels can't serve this format, and what to do about it."""
    k, v = fmt.keys, fmt.values
    if not isinstance(k, SketchKeys):
        return f"{fmt.name} has no CUDA kernels, they are for QJL keys; its kernels are Triton's or PyTorch's"
    d = fmt.geometry.head_size
    if d not in HEAD_SIZES:
        return f"the CUDA kernels for QJL know head sizes 64, 128 and 256, not {d}; use another format for this model"
    if (k.m, k.m_out, k.n) != (2 * d, d, d // 16):
        return (
            f"the CUDA kernels for QJL are compiled for m={2 * d}, m_out={d}, outliers={d // 16} at head size {d}; "
            f"leave these options out (they are {k.m}, {k.m_out}, {k.n})"
        )
    if not isinstance(v, TokenValues) or (v.bits, v.group) != (2, 32):
        return "the CUDA kernels for QJL read per-token values of 2 bits in groups of 32; leave the value options out"
    return None


def supports(fmt: PageFormat) -> bool:
    return why_not(fmt) is None


def library(device: torch.device) -> Any:
    """The library for this device, built and loaded at the first call. Raises BuildError, one sentence."""
    if device.type == "cpu":
        return build_cuda.load_emulation()
    if device.type != "cuda" or torch.version.cuda is None:
        raise BuildError(f"the CUDA kernels need an NVIDIA GPU, not {device.type}")
    return build_cuda.load(build_cuda.architecture_for(torch.cuda.get_device_capability(device)))


_bound: dict[tuple[int, torch.device], tuple[PageFormat, Bound]] = {}


def bind(fmt: PageFormat, device: torch.device) -> Bound:
    found = _bound.get((id(fmt), device))
    if found is None:
        refusal = why_not(fmt)
        if refusal:
            raise ValueError(refusal)
        k, at = fmt.keys, fmt.slab_region.offset
        assert isinstance(k, SketchKeys)
        names = ("k_bits", "k_norm", "ko_bits", "ko_norm", "ko_index", "v_codes", "v_scale", "v_zero")
        sizes = (fmt.geometry.head_size, fmt.record_bytes, fmt.slabs, fmt.slabs_at, k.m, k.m_out, k.n)
        layout = torch.tensor([*sizes, fmt.slab_region.nbytes, *(at(n) for n in names)])
        inner, outer = k.sketch(device).T.contiguous(), k.sketch_out(device).T.contiguous()
        found = _bound[id(fmt), device] = (fmt, Bound(layout, inner, outer, k.scale, k.scale_out))
    return found[1]


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def tile_rows(rows: int) -> int:
    """Rows (queries times query heads of one KV head) that one block attends."""
    return 8 if rows <= 8 else 16


def _programs(requests: int, rows: int, heads: int) -> int:
    return requests * heads * -(-rows // tile_rows(rows))


def splits_of(
    fmt: PageFormat, requests: int, q: int, query_heads: int, table: torch.Tensor, pages: torch.Tensor
) -> int:
    """Splits of the tokens, from shapes alone, so that a CUDA graph may keep them."""
    heads, slabs = pages.shape[1], table.shape[1] * fmt.slabs
    if pages.device.type != "cuda":
        return min(2, max(1, slabs))
    programs = _programs(requests, q * query_heads // heads, heads)
    wanted = PROGRAMS_PER_PROCESSOR * _processors(pages.device.index or 0) // max(1, programs)
    # four warps of a block take a slab each in turn; fewer than two turns cost more in the merge than they save
    return min(MAX_SPLITS, max(1, min(wanted, slabs // 8)))


def workspace_bytes(fmt: PageFormat, requests: int, q: int, query_heads: int, heads: int) -> int:
    """What `launch_attend` needs besides its results."""
    rows = q * query_heads // heads
    programs = _programs(requests, rows, heads)
    all_rows, d = programs * tile_rows(rows), fmt.geometry.d
    parts = (6 * d * all_rows, 4 * d * all_rows, 8 * d * all_rows, 4 * all_rows, 4 * all_rows, 16 * programs)
    return sum(-(-p // 256) * 256 for p in parts)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def launch_attend(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: torch.Tensor | None = None,
    longest: int = 0,
    workspace: torch.Tensor | None = None,
) -> None:
    """Fills out (splits, requests, queries, query heads, d) and lse, both dense float32: parts for `merge_parts`.

    With `start`, requests + 1 numbers on the device, query is (1, tokens, query heads, d): request i has the tokens
    [start[i], start[i + 1]), at most `longest`; tokens of no request are not written. `workspace`: uint8, at least
    `workspace_bytes`; taken from PyTorch's allocator if not given.
    """
    bound, lib = bind(fmt, pages.device), library(pages.device)
    requests = len(query) if start is None else len(start) - 1
    q = query.shape[1] if start is None else longest
    heads, query_heads = pages.shape[1], query.shape[2]
    rows = tile_rows(q * query_heads // heads)
    if workspace is None:
        size = workspace_bytes(fmt, requests, q, query_heads, heads)
        workspace = torch.empty(size + 256, dtype=torch.uint8, device=pages.device)
        workspace = workspace[-workspace.data_ptr() % 256 :]
    none = table.new_empty(0)
    with _device(pages.device):
        lib.attend_table(
            *(bound.layout, bound.inner, bound.outer, bound.scale_inner, bound.scale_outer, query),
            *(none if start is None else start, q, pages, table, low, high, scale, rows, workspace, out, lse),
            _stream(pages.device),
        )


def _device(device: torch.device) -> Any:
    """The CUDA runtime launches on the thread's current device."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def attend_table(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
    splits: int | None = None,
) -> Partial:
    """`triton.attend_table` for QJL: n requests with q queries each over their packed tokens [low, high).

    query (n, q, Hq, head_size) of any float type, pages (B, H, record_bytes) uint8, table (n, pages of the longest)
    int32 or int64, low and high (n,), or of the table's shape for limits per page. A padded row has high = 0. Pages
    out of range are never read, and slabs that were never packed are not seen.
    """
    n, q, query_heads, head_size = query.shape
    if head_size != fmt.geometry.head_size:
        raise ValueError(f"queries of {head_size} channels; the format is bound to {fmt.geometry.head_size}")
    if query_heads % pages.shape[1]:
        raise ValueError(f"{query_heads} query heads do not share {pages.shape[1]} KV heads evenly")
    if query.stride(-1) != 1:
        query = query.contiguous()
    if not query.numel() or not pages.shape[0] or not table.shape[1]:
        return (
            query.new_zeros(query.shape, dtype=torch.float32),
            query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32),
        )
    piece = q
    while piece > 1 and workspace_bytes(fmt, n, piece, query_heads, pages.shape[1]) > WORKSPACE_BYTES:
        piece = -(-piece // 2)
    if piece < q:
        parts = [
            attend_table(fmt, query[:, i : i + piece], pages, table, low, high, scale, splits)
            for i in range(0, q, piece)
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts], 1)
    splits = splits or splits_of(fmt, n, q, query_heads, table, pages)
    out = query.new_empty(splits, n, q, query_heads, head_size, dtype=torch.float32)
    lse = query.new_empty(splits, n, q, query_heads, dtype=torch.float32)
    launch_attend(fmt, query, pages, table, low, high, out, lse, scale)
    return (out[0], lse[0]) if splits == 1 else merge_parts(out, lse)


def merge_parts(
    out: torch.Tensor, lse: torch.Tensor, into: torch.Tensor | None = None, total: torch.Tensor | None = None
) -> Partial:
    """Parts stacked along dimension 0, dense float32 -> their merge, with its log-sum-exp."""
    into = torch.empty_like(out[0]) if into is None else into
    total = torch.empty_like(lse[0]) if total is None else total
    with _device(out.device):
        library(out.device).merge(out, lse, into, total, _stream(out.device))
    return into, total


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
    """`attend.attend_packed`: the pages of all requests in one list, which becomes a table (one host read)."""
    n = len(query)
    count = torch.bincount(owner, minlength=n)
    width = max(1, int(count.max())) if n else 1
    place = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner]
    table = torch.full((n, width), -1, dtype=torch.int32, device=pages.device)
    lows, highs = torch.zeros_like(table), torch.zeros_like(table)
    for target, source in ((table, page_ids), (lows, low), (highs, high)):
        target[owner, place] = source.to(torch.int32)
    return attend_table(fmt, query, pages, table, lows, highs, scale)


def pack(
    fmt: PageFormat,
    pages: torch.Tensor,
    page: torch.Tensor,
    slab: torch.Tensor,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor | None = None,
    ring: torch.Tensor | None = None,
    ring_value: int = 0,
) -> None:
    """Packs n slabs: tokens rows[i] (n, 32) of key and value (tokens, H, head_size) into slab[i] of page[i].

    `page`, `slab` and `rows` are int64 on the device; a page out of range is skipped. A negative row -1 - e is the
    token whose key, all heads one after the other, begins at element e of `ring` (dense, of the keys' type), its value
    `ring_value` elements later. `state` (n, H, 2, d) float32 is the prompt's (formats/qjl.py): without it every slab
    chooses its own outlier channels.
    """
    bound, lib = bind(fmt, pages.device), library(pages.device)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    state = bound.inner.new_empty(0) if state is None else state.contiguous()
    with _device(pages.device):
        lib.pack(
            *(bound.layout, bound.inner, bound.outer, pages, page, slab, rows.contiguous(), key, value, state),
            *(key.new_empty(0) if ring is None else ring, ring_value, _stream(pages.device)),
        )

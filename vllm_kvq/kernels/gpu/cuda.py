"""CUDA kernels for QJL (csrc/cuda): `CUDA`, of paged.py.

On CPU tensors the same source runs lane by lane (csrc/cuda/emulate.h), which is for tests. Every launch takes its sizes
from shapes and its lengths from the device, so a CUDA graph may keep it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch

from vllm_kvq.formats import PageFormat, page
from vllm_kvq.formats.methods.qjl import OneSketchKeys, SketchKeys
from vllm_kvq.formats.methods.values import TokenValues
from vllm_kvq.formats.parts import quant
from vllm_kvq.kernels.build import BuildError
from vllm_kvq.kernels.gpu import build as build_cuda
from vllm_kvq.kernels.gpu.paged import PackSource, PagedKernels, PageTable, Ragged
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.torch.attend import Partial

HEAD_SIZES = (64, 128, 256)
PROGRAMS_PER_PROCESSOR = 4
MAX_SPLITS = 128
WORKSPACE_BYTES = 256 << 20
"""A long chunk is attended in pieces whose workspace does not exceed this."""


class Bound(NamedTuple):
    """A format in the library's terms: its layout, and the sketches, transposed, on the pages' device."""

    layout: torch.Tensor
    inner: torch.Tensor
    outer: torch.Tensor
    scale_inner: float
    scale_outer: float


class Queries(NamedTuple):
    """`longest` queries of each request, from its `first` on; see `Ragged`."""

    query: torch.Tensor
    """(T, Hq, head_size)."""
    start: torch.Tensor
    first: int
    longest: int


class Part(NamedTuple):
    """`Partial`, for each split."""

    out: torch.Tensor
    lse: torch.Tensor


class Sidecars(NamedTuple):
    """The pool of sidecars (blocks, elements), the requests' blocks in it, and how one is cut (kernels/slots.py)."""

    pool: torch.Tensor
    table: torch.Tensor
    slots_per_block: int
    ring: int
    ring_at: int
    state_at: int
    has_state: bool


class Pair(NamedTuple):
    """A step's new keys and values (T, H, head_size)."""

    key: torch.Tensor
    value: torch.Tensor


TUPLES = (Bound, Queries, PageTable, Part, Sidecars, Pair)
"""What the library takes as one argument each, in its order (csrc/cuda/tuples.h)."""
NUMBERS = {"PAGE_MAGIC": page.MAGIC, "FLAGS_AT": page.FLAGS_AT, "LIMIT": int(quant.LIMIT)}
"""What both sides say, in the library's order (csrc/cuda/layout.h)."""


def checked(lib: Any) -> Any:
    """The library, if its tuples and numbers are those of this module. ValueError if not."""
    tuples = [f"{of.__name__}:{','.join(of._fields)}" for of in TUPLES]
    numbers = [f"{name}:{number}" for name, number in NUMBERS.items()]
    for what, theirs, ours in (("tuples", lib.tuples(), tuples), ("numbers", lib.numbers(), numbers)):
        if str(theirs).split() != ours:
            raise ValueError(f"the CUDA library's {what} are {theirs}, and not {' '.join(ours)}")
    return lib


@functools.cache
def library(device: torch.device) -> Any:
    """The library for this device, built and loaded at the first call. Raises BuildError, one sentence."""
    if device.type == "cpu":
        return checked(build_cuda.load_emulation())
    if device.type != "cuda" or torch.version.cuda is None:
        raise BuildError(f"the CUDA kernels need an NVIDIA GPU, not {device.type}")
    return checked(build_cuda.load(build_cuda.architecture_for(torch.cuda.get_device_capability(device))))


_bound: dict[tuple[int, torch.device], tuple[PageFormat, Bound]] = {}


def bind(fmt: PageFormat, device: torch.device) -> Bound:
    found = _bound.get((id(fmt), device))
    if found is None:
        if refusal := CUDA.why_not(fmt):
            raise ValueError(refusal)
        k, at = cast(SketchKeys, fmt.keys), fmt.slab_region.offset
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


def workspace_bytes(fmt: PageFormat, requests: int, q: int, query_heads: int, heads: int) -> int:
    """Workspace that an attention needs in addition to its results: sketched queries."""
    rows = q * query_heads // heads
    programs = _programs(requests, rows, heads)
    all_rows, d = programs * tile_rows(rows), fmt.geometry.d
    parts = (6 * d * all_rows, 4 * d * all_rows, 8 * d * all_rows, 4 * all_rows, 4 * all_rows, 16 * programs)
    return sum(-(-p // 256) * 256 for p in parts)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _device(device: torch.device) -> Any:
    """The CUDA runtime launches on the thread's current device."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


class CudaKernels(PagedKernels):
    name = "CUDA"
    caps = False

    def unsupported(self, fmt: PageFormat) -> str | None:
        # by their exact classes: a subclass may store something else
        if type(fmt.keys) not in (SketchKeys, OneSketchKeys):
            return f"{fmt.name} has no CUDA kernels, which are only for QJL keys; its kernels are Triton's or PyTorch's"
        k, v, d = cast(SketchKeys, fmt.keys), fmt.values, fmt.geometry.head_size
        if d not in HEAD_SIZES:
            return (
                f"the CUDA kernels for QJL know head sizes 64, 128 and 256, not {d}; use another format for this model"
            )
        if (k.m, k.m_out, k.n) != (2 * d, d, d // 16):
            return (
                f"the CUDA kernels for QJL are compiled for m={2 * d}, m_out={d}, outliers={d // 16} at head size {d}; "
                f"leave these options out (they are {k.m}, {k.m_out}, {k.n})"
            )
        if type(v) is not TokenValues or (v.bits, v.group) != (2, 32):
            return (
                "the CUDA kernels for QJL read per-token values of 2 bits in groups of 32; leave the value options out"
            )
        return None

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        return build_cuda.why_not(capability)

    def prepare(self, fmt: PageFormat, device: torch.device) -> None:
        library(device)
        bind(fmt, device)

    def splits_of(
        self, fmt: PageFormat, requests: int, q: int, query_heads: int, table: torch.Tensor, pages: torch.Tensor
    ) -> int:
        heads, slabs = pages.shape[1], table.shape[1] * fmt.slabs
        if pages.device.type != "cuda":
            return min(2, max(1, slabs))
        programs = _programs(requests, q * query_heads // heads, heads)
        wanted = PROGRAMS_PER_PROCESSOR * _processors(pages.device.index or 0) // max(1, programs)
        # each of a block's four warps takes a slab per turn; fewer than two turns cost more in the merge than they save
        return min(MAX_SPLITS, max(1, min(wanted, slabs // 8)))

    def launch_attend(
        self,
        fmt: PageFormat,
        query: torch.Tensor,
        pages: torch.Tensor,
        table: PageTable,
        into: Partial,
        scale: float,
        cap: float = 0.0,
        ragged: Ragged | None = None,
    ) -> None:
        if cap:
            raise ValueError(self.why_not(fmt, True))
        if ragged is None:  # the same number of queries for each request, one request after the other
            n, q = query.shape[:2]
            ragged = Ragged(torch.arange(0, (n + 1) * q, q, dtype=torch.int32, device=pages.device), q)
            query = query.reshape(1, n * q, *query.shape[2:])
        query, start, longest = query[0], ragged.start, ragged.longest
        bound, lib = bind(fmt, pages.device), library(pages.device)
        n, heads, query_heads = len(start) - 1, pages.shape[1], query.shape[1]
        piece = longest
        while piece > 1 and workspace_bytes(fmt, n, piece, query_heads, heads) > WORKSPACE_BYTES:
            piece = -(-piece // 2)
        size = workspace_bytes(fmt, n, piece, query_heads, heads)
        workspace = torch.empty(size + 256, dtype=torch.uint8, device=pages.device)
        workspace = workspace[-workspace.data_ptr() % 256 :]
        with _device(pages.device):
            for first in range(0, longest, piece):
                q = min(piece, longest - first)
                queries, rows = Queries(query, start, first, q), tile_rows(q * query_heads // heads)
                stream = _stream(pages.device)
                lib.attend_table(bound, queries, pages, table, scale, rows, workspace, Part(*into), stream)

    def pack(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        source: PackSource,
        pages: torch.Tensor,
        faults: torch.Tensor,
    ) -> None:
        bound, lib = bind(fmt, pages.device), library(pages.device)
        plan, table, side_table, side, key, value, units = source
        cut = slots.slots_per_block, slots.ring, slots.ring_at, slots.state_at, fmt.state_rows > 0
        sidecars, fresh = Sidecars(side, side_table, *cut), Pair(key, value)
        with _device(pages.device):
            lib.pack(bound, pages, plan, table, sidecars, fresh, faults, units, _stream(pages.device))


CUDA = CudaKernels()

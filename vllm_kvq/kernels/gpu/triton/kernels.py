"""Triton kernels (vllm_kvq.triton_kernels) for all key codecs but QJL's: `TRITON`, of gpu/paged.py.

On CPU tensors they run under Triton's interpreter. What they know about each codec is in codecs.py.
"""

from __future__ import annotations

import functools

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.methods.klt import TransformedKeys
from vllm_kvq.kernels.blame import blamed
from vllm_kvq.kernels.gpu import loading
from vllm_kvq.kernels.gpu.launch import unpack_launch
from vllm_kvq.kernels.gpu.paged import PackSource, PagedKernels, PageTable, Ragged
from vllm_kvq.kernels.gpu.triton.layout import (
    attend_launch,
    constants,
    pack_constants,
    pack_launch,
    rows_for,
)
from vllm_kvq.kernels.gpu.triton.transformed import features, tables
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.torch.attend import Partial

PROGRAMS_PER_PROCESSOR = 8
MAX_SPLITS = 128
LARGEST_HEAD = 256
"""The largest head size for which launches were found; larger ones have not been compiled."""


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def capability(device: torch.device) -> int:
    if device.type != "cuda":
        return loading.emulated or 90
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"compute capability {major}.{minor} is not supported; the Triton kernels need 8.0")
    return 10 * major + minor


def splits_for(programs: int, slabs: int, device: torch.device) -> int:
    """The number of splits of the tokens, from shapes only, as CUDA graphs require."""
    if device.type != "cuda":
        return min(2, max(1, slabs))
    wanted = PROGRAMS_PER_PROCESSOR * _processors(device.index or 0) // max(1, programs)
    # a split of less than 4 slabs costs more in the merge than it saves
    return min(MAX_SPLITS, max(1, min(wanted, slabs // 4)))


class TritonKernels(PagedKernels):
    name = "Triton"
    caps = True
    unpacks = True

    def unsupported(self, fmt: PageFormat) -> str | None:
        if fmt.geometry.d > LARGEST_HEAD:
            return f"the Triton kernels support head sizes up to {LARGEST_HEAD}, not {fmt.geometry.head_size}"
        if constants(fmt):
            return None
        return f"{fmt.name} has no Triton kernel for its keys or values{blamed(fmt, lambda o: bool(constants(o)))}"

    def prepare(self, fmt: PageFormat, device: torch.device) -> None:
        loading.load()
        if isinstance(fmt.keys, TransformedKeys) and fmt.keys.heads:
            tables(fmt, fmt.keys.heads, device)

    def splits_of(
        self, fmt: PageFormat, requests: int, q: int, query_heads: int, table: torch.Tensor, pages: torch.Tensor
    ) -> int:
        heads = pages.shape[1]
        rows = q * query_heads // heads
        programs = requests * heads * -(-rows // rows_for(fmt, rows))
        return splits_for(programs, table.shape[1] * fmt.slabs, pages.device)

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
        from vllm_kvq.triton_kernels.attend import attend_kernel

        ids, low, high = table
        if (of := tables(fmt, pages.shape[1], pages.device)) is not None:
            query = features(query if ragged is None else query[:, : ragged.tokens], of)
        n, q = query.shape[:2] if ragged is None else (len(ragged.start) - 1, ragged.longest)
        start = ids if ragged is None else ragged.start
        out, lse = into
        turn = lse if of is None else of.turn
        heads = pages.shape[1]
        share = query.shape[2] // heads
        m = rows_for(fmt, q * share)
        words, halves = typed(pages)
        launch = attend_launch(fmt, m, capability(pages.device))
        attend_kernel[(n * heads * -(-q * share // m), out.shape[0])](
            *(query, words, halves, ids, low, high, start, out, lse, turn, scale, q, heads),
            *(pages.shape[0], *query.stride()[:3], *words.stride()[:2], ids.stride(0), ids.shape[1]),
            *(lse[0].numel(), cap),
            SHARE=share,
            CAPPED=cap > 0,
            M=m,
            LISTED=low.dim() == 2,
            RAGGED=ragged is not None,
            TURN=launch.turn,
            EXTRA=launch.extra,
            **(constants(fmt) or {}),
            **launch.options,
        )

    def pack(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        source: PackSource,
        pages: torch.Tensor,
        faults: torch.Tensor,
    ) -> None:
        from vllm_kvq.triton_kernels.packing.kernel import pack_kernel

        plan, table, side_table, side, key, value, units = source
        n, floats = plan.shape[1], side.view(torch.float32)
        of = tables(fmt, slots.heads, pages.device)
        transform = (floats, plan, floats) if of is None else (of.forward, of.places, of.turn)
        words, halves = typed(pages)
        pack_kernel[(n * units, slots.heads)](
            *(plan, table, side_table, side, floats, key, value, words, halves, pages, faults, *transform, n, units),
            *(table.stride(0), table.shape[1], side_table.stride(0), pages.shape[0], side.shape[0]),
            *(floats.stride(0), side.stride(0), *key.stride()[:2], *value.stride()[:2], *words.stride()[:2]),
            **pack_constants(fmt, slots),
            **pack_launch(fmt, capability(pages.device)).options,
        )

    def unpack(
        self,
        fmt: PageFormat,
        pages: torch.Tensor,
        ids: torch.Tensor,
        seen: tuple[int, int],
        into: tuple[torch.Tensor, torch.Tensor],
        faults: torch.Tensor,
    ) -> None:
        from vllm_kvq.triton_kernels.unpack import unpack_kernel

        words, halves = typed(pages)
        of = tables(fmt, pages.shape[1], pages.device)
        back, turn = (into[0], into[0]) if of is None else (of.back, of.turn)
        unpack_kernel[(len(ids) * fmt.slabs, pages.shape[1])](
            *(words, halves, ids, *into, faults, back, turn, pages.shape[0], *seen, *words.stride()[:2]),
            **(constants(fmt) or {}),
            **unpack_launch(fmt).options,
        )


TRITON = TritonKernels()


def typed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes as int32 and as float16; a kernel never reads single bytes."""
    aligned = pages[..., : pages.shape[2] // 4 * 4]
    return aligned.view(torch.int32), aligned.view(torch.float16)

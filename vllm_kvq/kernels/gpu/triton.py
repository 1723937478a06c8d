"""Triton kernels (vllm_kvq.triton_kernels) for SQuat, KIVI, InnerQ and PolarQuant: `TRITON`, of kernels/paged.py.

What the integration runs on a GPU, one layer's whole step, is kernels/device.py.

No GPU has run them yet. They are tested under Triton's interpreter and compiled for sm_80 to sm_120
(docs/kernels.md). What a kernel does not know (`supports`) the PyTorch kernels serve.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.fields import ALIGN, round_up
from vllm_kvq.formats.innerq import GROUP, HybridKeys, HybridValues
from vllm_kvq.formats.polar import PaperPolarKeys, PolarKeys
from vllm_kvq.formats.squat import ChannelKeys
from vllm_kvq.formats.values import TokenValues
from vllm_kvq.kernels.gpu import loading
from vllm_kvq.kernels.gpu.launch import MIN_ROWS, attend_launch, power_of_two, rows_for
from vllm_kvq.kernels.gpu.paged import PagedKernels

PROGRAMS_PER_PROCESSOR = 8
MAX_SPLITS = 128


# as in triton_kernels/keys.py and values.py
_CHANNEL, _HYBRID, _POLAR = range(3)
_TOKEN, _HYBRID_VALUES = range(2)


STEPS = (16, 12, 8, 4)
"""Channels, or pairs, of one step of 16 of the matrix products: the most that fit."""


def _key_constants(fmt: PageFormat) -> dict[str, Any] | None:
    k, at = fmt.keys, fmt.slab_region.offset
    page = (fmt.slabs_at - fmt.page_region.nbytes) // 2  # the first page field, in float16
    none = {"ROTARY": 0, "INTERLEAVED": False, "RADIUS_BITS": 0, "PAPER": False, "K_PAGE": page}
    if isinstance(k, ChannelKeys):
        chunk = next(c for c in STEPS if k.d * k.bits // 8 % c == 0)  # in one plane
        own = {"KEYS": _CHANNEL, "K_BITS": k.bits, "K_SCALE": at("k_scale") // 2, "K_ZERO": at("k_zero") // 2}
        operands = k.d // chunk
    elif isinstance(k, HybridKeys):
        # in one plane and in one group
        chunk = math.gcd(k.d * k.bits // 8, 16)
        own = {"KEYS": _HYBRID, "K_BITS": k.bits, "K_SCALE": at("k_scale") // 2, "K_ZERO": at("k_slot") // 4}
        operands = k.d // chunk
    elif isinstance(k, PolarKeys):
        # in one plane, or in whole ones
        planes = [k.pairs] if k.nibbles else [k.pairs * k.m // 8, k.pairs * k.n // 8]
        chunk = next(c for c in STEPS if all(p % c == 0 or c % p == 0 for p in planes))
        own = {
            "KEYS": _POLAR,
            "K_BITS": k.m,
            "RADIUS_BITS": k.n,
            "PAPER": isinstance(k, PaperPolarKeys),
            "ROTARY": fmt.geometry.rotary,
            "INTERLEAVED": fmt.geometry.pairing == "interleaved",
            "K_SCALE": 0 if k.nibbles else at("k_radius") // 4,
            # from one page field to the next
            "K_ZERO": round_up(2 * k.pairs, ALIGN) // 2,
        }
        operands = 2 * k.pairs // chunk
    else:
        return None
    codes = "k_codes" if not isinstance(k, PolarKeys) else "k_polar" if k.nibbles else "k_angle"
    return none | own | {"K_CHUNK": chunk, "OPERANDS": operands, "K_CODES": at(codes) // 4}


def value_block(fmt: PageFormat) -> int:
    """Channels of a block that lies in one plane and in one group: a power of two, at most four per lane."""
    v = fmt.values
    assert isinstance(v, (TokenValues, HybridValues))
    block = math.gcd(v.d * v.bits // 8, v.group if isinstance(v, TokenValues) else GROUP)
    return min(32, block & -block)


def _value_constants(fmt: PageFormat) -> dict[str, Any] | None:
    v, at = fmt.values, fmt.slab_region.offset
    if isinstance(v, TokenValues):
        kind, group, zero = _TOKEN, v.group, at("v_zero") // 2
    elif isinstance(v, HybridValues):
        kind, group, zero = _HYBRID_VALUES, GROUP, at("v_slot") // 4
    else:
        return None
    block = value_block(fmt)
    return {
        "VALUES": kind,
        "V_BITS": v.bits,
        "V_GROUP": group,
        "V_BLOCK": block,
        "V_PLACES": max(16, block),
        "V_CODES": at("v_codes") // 4,
        "V_SCALE": at("v_scale") // 2,
        "V_ZERO": zero,
    }


@functools.lru_cache(maxsize=64)
def constants(fmt: PageFormat) -> dict[str, Any] | None:
    """The kernel's compile-time constants: this record's layout. None for a codec that it does not know."""
    keys, values = _key_constants(fmt), _value_constants(fmt)
    if keys is None or values is None:
        return None
    shape = {
        "HEAD": fmt.geometry.head_size,
        "D": fmt.geometry.d,
        "SLABS": fmt.slabs,
        "SLABS_AT": fmt.slabs_at // 4,
        "SLAB_WORDS": fmt.slab_region.nbytes // 4,
    }
    return shape | keys | values


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def capability(device: torch.device) -> int:
    if device.type != "cuda":
        return loading.emulated() or 90
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"compute capability {major}.{minor} is not supported; the Triton kernels need 8.0")
    return 10 * major + minor


def splits_for(programs: int, slabs: int, device: torch.device) -> int:
    """Splits of the tokens, from shapes alone, so that a CUDA graph may keep them."""
    if device.type != "cuda":
        return min(2, max(1, slabs))
    wanted = PROGRAMS_PER_PROCESSOR * _processors(device.index or 0) // max(1, programs)
    # a split of less than 4 slabs costs more in the merge than it saves
    return min(MAX_SPLITS, max(1, min(wanted, slabs // 4)))


TABLE_CHIPS: frozenset[int] = frozenset()
"""Compute capabilities on which PolarQuant's scores by table lookup were measured to be faster: none has been tried."""


def table_rows(fmt: PageFormat, rows: int, chip: int, scores: str | None) -> int:
    """How many rows of a decode step look their PolarQuant scores up in a table; 0: keys are rebuilt and multiplied."""
    if not isinstance(fmt.keys, PolarKeys) or rows > MIN_ROWS or fmt.keys.m > 4:
        return 0
    wanted = scores or os.environ.get("VLLM_KVQ_POLAR_SCORES") or ("table" if chip in TABLE_CHIPS else "dot")
    if wanted not in ("dot", "table"):
        raise ValueError(f"PolarQuant's scores are 'dot' or 'table', not {wanted!r} (VLLM_KVQ_POLAR_SCORES)")
    return power_of_two(rows) if wanted == "table" else 0


@dataclass(frozen=True)
class TritonKernels(PagedKernels):
    scores: str | None = None
    """PolarQuant's: "dot" or "table"; None: as $VLLM_KVQ_POLAR_SCORES says, else what is faster on the chip."""

    def why_not(self, fmt: PageFormat) -> str | None:
        return None if constants(fmt) else f"{fmt.name} has no Triton kernel for its keys or values"

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
        table: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        start: torch.Tensor | None = None,
        longest: int = 0,
    ) -> None:
        from vllm_kvq.triton_kernels.decode import attend_kernel

        n, q = query.shape[:2] if start is None else (len(start) - 1, longest)
        heads = pages.shape[1]
        share = query.shape[2] // heads
        m, chip = rows_for(fmt, q * share), capability(pages.device)
        words, halves = typed(pages)
        table_of = table_rows(fmt, q * share, chip, self.scores)
        launch = attend_launch(fmt, m, chip, table_of)
        attend_kernel[(n * heads * -(-q * share // m), out.shape[0])](
            *(query, words, halves, table, low, high, table if start is None else start, out, lse, scale, q, heads),
            *(pages.shape[0], *query.stride()[:3], *words.stride()[:2], table.stride(0), table.shape[1]),
            lse[0].numel(),
            SHARE=share,
            M=m,
            LISTED=low.dim() == 2,
            RAGGED=start is not None,
            TABLE=table_of,
            TURN=launch.turn,
            EXTRA=launch.extra,
            **(constants(fmt) or {}),
            **launch.options,
        )


TRITON = TritonKernels()


def typed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes as int32 and as float16; a kernel never reads single bytes."""
    aligned = pages[..., : pages.shape[2] // 4 * 4]
    return aligned.view(torch.int32), aligned.view(torch.float16)

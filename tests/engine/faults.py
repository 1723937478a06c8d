"""Faults for the fuzzer to find, planted into a running engine (functions for `EngineProcess`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from poison import packed_layers


def stale_page(engine: Any) -> None:
    """Every third block keeps the slabs that its last owner packed: silent, for they are well formed."""
    for layer in packed_layers(engine):
        layer.kernels = replace(layer.kernels, pack=_keeping_old(layer.kernels.pack))


def _keeping_old(pack: Any) -> Any:
    def packed(fmt: Any, pages: torch.Tensor, units: Any, *rest: Any) -> Any:
        blocks = units.page[units.page % 3 == 0].unique()
        before, there = pages[blocks], fmt.packed_slabs(pages, blocks)
        replaced = pack(fmt, pages, units, *rest)
        size = fmt.slab_region.nbytes
        for i, slab in there.nonzero().tolist():
            at = slice(fmt.slabs_at + slab * size, fmt.slabs_at + (slab + 1) * size)
            pages[blocks[i], :, at] = before[i, :, at]
        return replaced

    return packed

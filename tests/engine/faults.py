"""Faults for the fuzzer to find, planted in a running engine (functions for `EngineProcess`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from poison import packed_layers


def stale_page(engine: Any) -> None:
    """Every third block keeps the slabs that its first owner packed. No check fails: they are well formed."""
    layers = packed_layers(engine)
    assert layers
    for layer in layers:
        layer.step = step = getattr(layer.step, "planned", layer.step)  # a decode step in one call packs by itself
        step.kernels = replace(step.kernels, pack=_keeping_old(step.kernels.pack))


def _keeping_old(pack: Any) -> Any:
    first: dict[tuple[int, int], torch.Tensor] = {}

    def packed(fmt: Any, pages: torch.Tensor, units: Any, *rest: Any) -> Any:
        replaced = pack(fmt, pages, units, *rest)
        size = fmt.slab_region.nbytes
        for page in units.page[units.page % 3 == 0].unique().tolist():
            for slab in fmt.packed_slabs(pages, torch.tensor([page]))[0].nonzero().flatten().tolist():
                at = slice(fmt.slabs_at + slab * size, fmt.slabs_at + (slab + 1) * size)
                pages[page, :, at] = first.setdefault((page, slab), pages[page, :, at].clone())
        return replaced

    return packed


def rewritten_pages(engine: Any) -> None:
    """The first page of every request is written again in each step."""
    for layer in packed_layers(engine):
        run = layer.run

        def wrong(batch: Any, *tensors: Any, run: Any = run) -> None:
            run(batch, *tensors)
            tensors[3].view(torch.uint8)[batch.table[:, 0].long(), ..., -1] += 1

        layer.run = wrong


def rewritten_sinks(engine: Any) -> None:
    """The sink pages of every request are written again in each step, as if they were its own."""
    for layer in packed_layers(engine):
        run = layer.run

        def wrong(batch: Any, *tensors: Any, layer: Any = layer, run: Any = run) -> None:
            run(batch, *tensors)
            layer.sinks.blocks[batch.sink_table[:, 0].long(), 0] += 1

        layer.run = wrong


RESIDUE = 17


def one_residue(engine: Any) -> None:
    """A chunk that ends 17 tokens into a page loses its last token's attention."""
    for layer in packed_layers(engine):
        run = layer.run

        def wrong(batch: Any, *tensors: Any, run: Any = run) -> None:
            run(batch, *tensors)
            for i, length in enumerate(batch.lengths):
                if length > 6 and int(batch.seq_lens[i]) % 64 == RESIDUE:
                    tensors[4][int(batch.query_start[i + 1]) - 1] = 0

        layer.run = wrong


LOST = 20


def one_page_lost(engine: Any) -> None:
    """From the 21st page of a request on, the block table is one page behind: page 20 is overwritten."""
    for layer in packed_layers(engine):
        run = layer.run

        def wrong(batch: Any, *tensors: Any, run: Any = run) -> None:
            table = batch.table.clone()
            table[:, LOST:] = batch.table[:, LOST - 1 : -1]
            run(replace(batch, table=table), *tensors)

        layer.run = wrong

"""Names the formats whose prompts a GPU serves slowly, in one sentence with what to use instead."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_kvq.formats import FORMATS, PageFormat


def slow(fmt: PageFormat) -> str | None:
    """The sentence about a format that the GPU's path serves; None if there is nothing to say."""
    if not (fmt.state_rows and fmt.keys.fits_queries):
        return None
    same = next((other.name for other in _others(fmt) if other.slab_region == fmt.slab_region), None)
    return (
        f"{fmt.name} is slow with prompts on a GPU: each layer looks for eigenvectors in every chunk, which took six "
        f"times as long as the layer itself (docs/gpu.md); "
        + (f"use {same}, which stores the same fields" if same else "--kv-cache-dtype auto may be faster")
    )


def _others(fmt: PageFormat) -> Iterator[PageFormat]:
    """The public formats that fit no subspace, as they are by default."""
    for other in FORMATS.values():
        if other.public and not other.keys.fits_queries:
            try:
                yield other.bind(fmt.geometry)
            except ValueError:  # a head size that this format does not store
                continue

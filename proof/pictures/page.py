"""A page drawn to scale: its header and slabs, the fields of one slab, and a request that consists of such pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proof.pictures.canvas import OURS, QUIET, picture
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.fields import ALIGN
from vllm_kvq.formats.page import HEADER_BYTES
from vllm_kvq.formats.planes import SLAB

FORMAT, HEAD_SIZE, BLOCK = "kitty2", 128, 128
REQUEST = 600
"""Tokens of the request: enough for whole pages, a page in progress and a window."""
COLORS = {"key": OURS, "value": "#3d8f6f", "header": QUIET, "16 bits": "#c2571a"}
LETTER = 0.0075
"""The width of one letter, as a share of the picture's."""
Part = tuple[str, float, str]
"""What it is, its size, and the colour of its kind."""


def data() -> list[tuple[str, list[Part]]]:
    """Three rows, each with its title: a request, one of its pages, one slab of it."""
    fmt = bound()
    slab = fmt.slab_region.nbytes
    return [
        (f"A request of {REQUEST} tokens, and where each token is read from", request_parts(fmt)),
        (f"One page: {fmt.N} tokens of one KV head, {fmt.record_bytes:,} bytes", page_parts(fmt)),
        (f"One slab: {SLAB} tokens, {slab:,} bytes; keys blue, values green", slab_parts(fmt)),
    ]


def bound() -> PageFormat:
    return get_format(FORMAT).bind(Geometry(HEAD_SIZE, BLOCK, torch.bfloat16))


def draw(path: Path) -> None:
    rows, fmt = data(), bound()
    plain = 2 * 2 * HEAD_SIZE * fmt.N
    title = f"{FORMAT}, head size {HEAD_SIZE}: {fmt.bits_per_element:.2f} bits per number"
    with picture(path, rows, 1, (10.5, 4.6)) as (axes,):
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.4, 3.35)
        for i, (about, parts) in enumerate(rows):
            _bar(axes, 2.5 - 1.2 * i, parts, about)
        axes.text(0, 3.35, f"{title}; the same page in bf16 has {plain:,} bytes", weight="bold", va="top")


def request_parts(fmt: PageFormat) -> list[Part]:
    """From the first token to the newest: sinks, what is packed, and the window that is not."""
    packed = (REQUEST - fmt.W) // fmt.unit * fmt.unit
    pages = [f"page {i}" for i in range(-(-packed // fmt.N))]
    sizes = [min(fmt.N, packed - i * fmt.N) for i in range(len(pages))]
    parts: list[Part] = [(name, size, "key") for name, size in zip(pages, sizes, strict=True)]
    parts[0] = (parts[0][0], parts[0][1] - fmt.S, "key")
    newest = REQUEST - packed
    return [(f"{fmt.S} sinks", fmt.S, "16 bits"), *parts, (f"newest {newest} in 16 bits", newest, "16 bits")]


def page_parts(fmt: PageFormat) -> list[Part]:
    named = [("header", HEADER_BYTES, "header")]
    named += [(f.name, max(f.nbytes, ALIGN), "key") for f in fmt.keys.page_fields + fmt.values.page_fields]
    slabs = [(f"slab {i}", fmt.slab_region.nbytes, "key") for i in range(fmt.slabs)]
    rest = fmt.record_bytes - fmt.slabs_at - fmt.slabs * fmt.slab_region.nbytes
    return [*named, *slabs, *([("", rest, "header")] if rest else [])]


def slab_parts(fmt: PageFormat) -> list[Part]:
    region, keys = fmt.slab_region, {f.name for f in fmt.keys.slab_fields}
    ends = [*region.offsets[1:], region.nbytes]
    return [
        (f"{field.name}\n{field.nbytes:,}", end - begin, "key" if field.name in keys else "value")
        for field, begin, end in zip(region.fields, region.offsets, ends, strict=True)
    ]


def _bar(axes: Any, y: float, parts: list[Part], title: str) -> None:
    """Boxes whose widths are to scale; names that do not fit stand below their boxes, each a line lower."""
    total, x, below = sum(size for _, size, _ in parts), 0.0, 0
    axes.text(0, y + 0.3, title, fontsize=10, va="bottom")
    for name, size, kind in parts:
        width, middle = size / total, x + size / total / 2
        axes.barh(y, width, 0.5, left=x, color=COLORS[kind], alpha=0.85, edgecolor="white", linewidth=1.2)
        if max(map(len, name.split("\n"))) * LETTER < width:
            axes.text(middle, y, name, color="white", fontsize=8.5, ha="center", va="center")
        elif name:
            on_the_left, down = middle < 0.5, 0.3 + 0.17 * (below if x > 0.5 else 0)
            below += not on_the_left
            axes.plot([middle, middle], [y - 0.27, y - down - 0.06], color=COLORS[kind], linewidth=0.8)
            axes.text(middle + (0.004 if on_the_left else -0.004), y - down, name.replace("\n", " "), fontsize=8,
                      color=COLORS[kind], va="top", ha="left" if on_the_left else "right")  # fmt: skip
        x += width

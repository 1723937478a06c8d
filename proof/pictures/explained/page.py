"""A page drawn to scale: its header and slabs, the fields of one slab, a request that consists of such pages, and what
it holds in addition to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proof.pictures.canvas import picture
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.page import HEADER_BYTES
from vllm_kvq.formats.parts.fields import ALIGN
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.kernels import slots
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.naming import OTHERS, OURS

FORMAT, HEAD_SIZE, BLOCK = "kitty2", 128, 128
REQUEST = 600
"""Tokens of the request: enough for whole pages, a page in progress and a window."""
WITH_STATE = "squat2"
"""A format whose sidecar also keeps what it has fitted to the prompt, on pages of the same size."""
INK = "#5b626d"
COLORS = {"key": OURS, "value": "#3d8f6f", "header": INK, "16 bits": OTHERS, "state": "#7a5ba6", "free": "#bcc2cb"}
LETTER = 0.0075
"""The width of one letter, as a share of the picture's."""
Part = tuple[str, float, str]
"""What it is, its size, and the colour of its kind."""
IN_BLOCKS = 3
"""The rows from this one on have the same scale."""
APART = 1.2
"""The distance of rows."""
GAP = "gap"
"""The kind of what is left out between two blocks."""


def data() -> list[tuple[str, list[Part]]]:
    """Rows, each with its title: a request, one of its pages, one slab of it, and what is not in pages."""
    fmt = bound()
    slab = fmt.slab_region.nbytes
    return [
        (f"A request of {REQUEST} tokens, and where each token is read from", request_parts(fmt)),
        (f"One page: {fmt.N} tokens of one KV head, {fmt.record_bytes:,} bytes", page_parts(fmt)),
        (f"One slab: {SLAB} tokens, {slab:,} bytes; keys blue, values green", slab_parts(fmt)),
        ("What a request holds in addition to pages, in blocks as large as a page: sidecar and sinks of one KV head", [
            *companion_parts(companion_blocks(fmt))
        ]),
        (f"The same with {WITH_STATE}, whose sidecar also has the subspace that is fitted to the prompt", [
            *companion_parts(companion_blocks(bound(WITH_STATE)))
        ]),
    ]  # fmt: skip


def bound(name: str = FORMAT) -> PageFormat:
    return get_format(name).bind(Geometry(HEAD_SIZE, BLOCK, torch.bfloat16))


def draw(path: Path) -> None:
    rows, fmt = data(), bound()
    plain = 2 * 2 * HEAD_SIZE * fmt.N
    title = f"{FORMAT}, head size {HEAD_SIZE}: {fmt.bits_per_element:.2f} bits per number"
    top = APART * (len(rows) - 1)
    widest = max(map(_size, (parts for _, parts in rows[IN_BLOCKS:])))
    with picture(path, rows, 1, (10.5, 7.2)) as (axes,):
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.5, top + 0.85)
        for i, (about, parts) in enumerate(rows):
            _bar(axes, top - APART * i, parts, about, widest if i >= IN_BLOCKS else _size(parts))
        axes.text(0, top + 0.85, f"{title}; the same page in bf16 has {plain:,} bytes", weight="bold", va="top")


def _size(parts: list[Part]) -> float:
    return sum(size for _, size, _ in parts)


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


def companion_blocks(fmt: PageFormat) -> list[list[Part]]:
    """What lies in each block of one KV head's sidecar, and in that of its sinks; bytes."""
    at = SlotGeometry.of(fmt, 1, 0)
    kinds = [*["header"] * at.state_at, *["state"] * at.state_slots, *["ring"] * at.ring]
    cut = [kinds[i : i + at.slots_per_block] for i in range(0, len(kinds), at.slots_per_block)]
    blocks = [_block(at, kinds) for kinds in (*cut, ["sinks"] * at.sinks)]
    if at.header_at:
        *used, (free, size, color) = blocks[0]
        header = ("header", slots.HEADER_BYTES, "header")
        blocks[0] = [*used, header, (free, size - slots.HEADER_BYTES, color)]
    return blocks


SAID = {"header": ("header", "header"), "state": ("subspace", "state"), "ring": ("ring, {} tokens", "16 bits"),
        "sinks": ("{} sinks", "16 bits")}  # fmt: skip
"""What a kind of slots is called, and the kind of its colour."""


def _block(at: SlotGeometry, kinds: list[str]) -> list[Part]:
    """Slots of one kind next to each other are one part."""
    parts: list[Part] = []
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        name, color = SAID[kind]
        parts.append((name.format(count), count * at.slot_bytes, color))
    return [*parts, ("free", at.page_bytes - len(kinds) * at.slot_bytes, "free")]


def companion_parts(blocks: list[list[Part]]) -> list[Part]:
    """In a row, with a gap between blocks."""
    between = ("", 0.05 * _size(blocks[0]), GAP)
    return [part for i, block in enumerate(blocks) for part in ([between] * (i > 0) + block)]


def _bar(axes: Any, y: float, parts: list[Part], title: str, total: float) -> None:
    """Boxes whose widths are to scale; names that do not fit stand below their boxes."""
    axes.text(0, y + 0.3, title, fontsize=10, va="bottom")
    x, below = 0.0, []
    for name, size, kind in parts:
        width, middle = size / total, x + size / total / 2
        x += width
        if kind == GAP:
            continue
        axes.barh(y, width, 0.5, left=x - width, color=COLORS[kind], alpha=0.85, edgecolor="white", linewidth=1.2)
        if max(map(len, name.split("\n"))) * LETTER < width:
            ink = INK if kind == "free" else "white"
            axes.text(middle, y, name, color=ink, fontsize=8.5, ha="center", va="center")
        elif name and kind != "free":
            below.append((name.replace("\n", " "), middle, COLORS[kind]))
    for (name, middle, color), line in zip(below, lines([(name, middle) for name, middle, _ in below]), strict=True):
        left, down = middle < 0.5, 0.3 + 0.17 * line
        axes.plot([middle, middle], [y - 0.27, y - down - 0.06], color=color, linewidth=0.8)
        axes.text(middle + (0.004 if left else -0.004), y - down, name, fontsize=8, color=color, va="top",
                  ha="left" if left else "right")  # fmt: skip


def lines(names: list[tuple[str, float]]) -> list[int]:
    """The line below its box on which each name stands, at the right of its place in the left half and at the left of
    it in the right half: the first one that has room, from the middle to both ends, so that no name is crossed."""
    found, taken = [0] * len(names), list[tuple[int, float, float]]()
    for i in sorted(range(len(names)), key=lambda i: abs(names[i][1] - 0.5)):
        name, x = names[i]
        begin, end = (x, x + len(name) * LETTER) if x < 0.5 else (x - len(name) * LETTER, x)
        while any(line == found[i] and begin < right and left < end for line, left, right in taken):
            found[i] += 1
        taken.append((found[i], begin, end))
    return found

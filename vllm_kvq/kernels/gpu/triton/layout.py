"""What the launches of Triton's kernels read of a format: constants that a kernel is compiled for, rows and warps.

From the tables of codecs.py, as the constants that triton_kernels/layout.py declares.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, cast

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.methods.innerq import HybridValues
from vllm_kvq.formats.methods.klt import SearchedValues
from vllm_kvq.formats.methods.values import Rotated
from vllm_kvq.formats.variant import Fitted
from vllm_kvq.kernels.gpu.launch import MAX_ROWS, MIN_ROWS, Launch, largest_power, power_of_two
from vllm_kvq.kernels.gpu.triton.codecs import KEYS, STATES, TILE_WARPS, VALUES, Constants, State, words
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.triton_kernels.layout import Companion, Keys, Record, Values

LAYERS = 512
"""Formats that are remembered: each layer of a model may have its own."""


@functools.lru_cache(maxsize=LAYERS)
def record(fmt: PageFormat) -> Record:
    return Record(
        head=fmt.geometry.head_size,
        d=fmt.geometry.d,
        columns=power_of_two(fmt.geometry.d),
        slabs=fmt.slabs,
        slabs_at=fmt.slabs_at // 4,
        slab_words=fmt.slab_region.nbytes // 4,
        unit=fmt.unit,
        tokens=power_of_two(fmt.unit),
    )


def companion(slots: SlotGeometry) -> Companion:
    return Companion(
        heads=slots.heads,
        per_block=slots.slots_per_block,
        slot=slots.slot_bytes // slots.itemsize,
        words=slots.slot_bytes // 4,
        header=slots.header_at // 4,
        state_at=slots.state_at,
        ring=slots.ring,
        ring_at=slots.ring_at,
        sidecar_blocks=slots.sidecar_blocks,
    )


def _keys(fmt: PageFormat) -> Keys:
    entry = KEYS[type(fmt.keys)]
    return Keys(entry.kind, **entry.attend(fmt, fmt.keys))


def _values(fmt: PageFormat) -> Values:
    (kind, of_values), v = VALUES[type(fmt.values)], cast(Any, fmt.values)
    found: Constants = {"bits": v.bits, "high": 0} | of_values(fmt, v)
    planes = v.d * found["bits"] // 8, v.d // 8 if found["high"] else 0
    block = min(32, largest_power(math.gcd(*planes, found["group"])))
    found |= {"codes": words(fmt, "v_codes")}
    return Values(kind, block=block, places=max(16, block), **found)


@functools.lru_cache(maxsize=LAYERS)
def constants(fmt: PageFormat) -> Constants | None:
    """What attention and unpacking are compiled for. None for a codec that the kernels do not know."""
    if type(fmt.keys) not in KEYS or type(fmt.values) not in VALUES:
        return None
    return {"R": record(fmt), "K": _keys(fmt), "V": _values(fmt)}


@functools.lru_cache(maxsize=LAYERS)
def _packed(fmt: PageFormat) -> Constants:
    known = constants(fmt)
    if known is None:
        raise ValueError(f"{fmt.name} has no Triton kernel that packs its keys or values")
    keys, values = fmt.keys, fmt.values
    own = {"update": fmt.geometry.d} | KEYS[type(keys)].pack(keys)
    mode = values.mode if isinstance(values, HybridValues) else 0
    kind = {"fitted": isinstance(values, Fitted), "mode": mode}
    k, v = replace(known["K"], fitted=isinstance(keys, Fitted), **own), replace(known["V"], **kind)
    return known | {"K": k, "V": v}


def pack_constants(fmt: PageFormat, slots: SlotGeometry) -> Constants:
    """What packing is compiled for. ValueError for a codec that the kernels do not know."""
    return _packed(fmt) | {"C": companion(slots)}


def state_constants(fmt: PageFormat) -> Constants:
    """Compile-time constants of `begin`: what it keeps of a prompt."""
    state = STATES.get(type(fmt.keys), State()) if fmt.state_rows else State()
    rank = fmt.state_rows - 1 if state.of_queries else 0
    return {"NORM": state.of_keys == "NORM", "ENERGY": state.of_keys == "ENERGY", "RANK": rank}


def most_rows(fmt: PageFormat) -> int:
    return KEYS[type(fmt.keys)].wide_rows if fmt.geometry.d > 128 else MAX_ROWS


def rows_for(fmt: PageFormat, rows: int) -> int:
    """Rows per program: all rows of a decode step, a tile of a longer chunk."""
    return min(most_rows(fmt), max(MIN_ROWS, power_of_two(rows)))


def attend_launch(fmt: PageFormat, rows: int, chip: int) -> Launch:
    k, d = fmt.keys, fmt.geometry.d
    if d > 128 and rows > MIN_ROWS:
        return Launch(2)
    entry = KEYS[type(k)]
    one = entry.crowded(k, rows, chip) or fmt.slabs % 2
    return Launch(1, 1 if one else 2, extra=entry.extra(k, chip))


def pack_launch(fmt: PageFormat, chip: int) -> Launch:
    launch = KEYS[type(fmt.keys)].launch(fmt, fmt.keys, chip)
    tiled = isinstance(fmt.values, (Rotated, Fitted, SearchedValues))
    return replace(launch, warps=max(launch.warps, TILE_WARPS)) if tiled else launch

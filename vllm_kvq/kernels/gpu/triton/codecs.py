"""What the Triton kernels know about each codec: its kind, where its fields lie, how its kernels are launched.

One table for keys, one for values and one for the states that prompts leave, by the exact class of the codec: a
subclass may store something else. A format whose codecs are in the first two is packed and attended by Triton.

What the kernels take is declared in triton_kernels/layout.py; layout.py fills that in from these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.codec import KeyCodec
from vllm_kvq.formats.methods.innerq import GROUP, HybridKeys, HybridValues
from vllm_kvq.formats.methods.kitty import LOW, BoostedKeys
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.methods.klt import DIGIT, SearchedValues, TransformedKeys
from vllm_kvq.formats.methods.polar import PaperPolarKeys, PolarKeys
from vllm_kvq.formats.methods.qjl import SketchKeys
from vllm_kvq.formats.methods.squat import BoostedSQuatKeys, Corrected, SQuatKeys
from vllm_kvq.formats.methods.values import Rotated, TokenValues
from vllm_kvq.formats.parts.rotation import block
from vllm_kvq.formats.parts.search import widths
from vllm_kvq.formats.variant import Fitted, variant
from vllm_kvq.kernels.gpu.launch import MAX_ROWS, MIN_ROWS, Launch, largest_power, power_of_two
from vllm_kvq.triton_kernels.layout import CHANNEL, HYBRID, HYBRID_VALUES, POLAR, TOKEN, TRANSFORMED
from vllm_kvq.triton_kernels.version import old_triton

Constants = dict[str, Any]

STEPS = (16, 12, 8, 4)
"""The largest number of channels, or pairs, in one step of 16 of the matrix products."""

TILE_WARPS = 8
"""Warps for packing a slab as one tile: with fewer, there are not enough registers."""


# -- where fields lie --------------------------------------------------------------------------------------------------
def words(fmt: PageFormat, name: str) -> int:
    """Where a slab's field begins, in words."""
    return fmt.slab_region.offset(name) // 4


def halves(fmt: PageFormat, name: str) -> int:
    """Where a slab's field begins, in halves."""
    return fmt.slab_region.offset(name) // 2


def _page_halves(fmt: PageFormat, name: str) -> int:
    return (fmt.slabs_at - fmt.page_region.nbytes + fmt.page_region.offset(name)) // 2


def _per_channel(fmt: PageFormat, d: int, bits: int) -> Constants:
    chunk = next(c for c in STEPS if d * bits // 8 % c == 0)  # in one plane
    codes = {"bits": bits, "chunk": chunk, "operands": d // chunk, "codes": words(fmt, "k_codes")}
    return codes | {"scale": halves(fmt, "k_scale"), "zero": halves(fmt, "k_zero")}


def _channel_attend(fmt: PageFormat, k: ChannelKeys) -> Constants:
    return _per_channel(fmt, k.d, k.bits)


def _boosted_attend(fmt: PageFormat, k: BoostedKeys) -> Constants:
    return _per_channel(fmt, k.d, LOW) | {"boosted": k.boosted, "high": words(fmt, "k_high")}


def _hybrid_attend(fmt: PageFormat, k: HybridKeys) -> Constants:
    chunk = math.gcd(k.d * k.bits // 8, 16)  # in one plane and in one group
    codes = {"bits": k.bits, "chunk": chunk, "operands": k.d // chunk, "codes": words(fmt, "k_codes")}
    slot = {"scale": halves(fmt, "k_scale"), "slot": words(fmt, "k_slot")}
    return codes | slot | {"norm": _page_halves(fmt, "k_inner_norm")}


def _polar_attend(fmt: PageFormat, k: PolarKeys) -> Constants:
    # in one plane, or in whole ones
    planes = [k.pairs] if k.nibbles else [k.pairs * k.m // 8, k.pairs * k.n // 8]
    chunk = next(c for c in STEPS if all(p % c == 0 or c % p == 0 for p in planes))
    codes = {"bits": k.m, "radius_bits": k.n, "chunk": chunk, "operands": 2 * k.pairs // chunk}
    if k.nibbles:
        codes |= {"codes": words(fmt, "k_polar")}
    else:
        codes |= {"codes": words(fmt, "k_angle"), "radius": words(fmt, "k_radius")}
    pairing = {"rotary": fmt.geometry.rotary, "interleaved": fmt.geometry.pairing == "interleaved"}
    return codes | pairing | {f.name[2:]: _page_halves(fmt, f.name) for f in k.page_fields}


def _paper_attend(fmt: PageFormat, k: PaperPolarKeys) -> Constants:
    return _polar_attend(fmt, k) | {"paper": True}


def _transformed_attend(fmt: PageFormat, k: TransformedKeys) -> Constants:
    plane = k.slots * DIGIT // 8
    chunk = next(c for c in STEPS if plane % c == 0)
    codes = {"bits": DIGIT, "chunk": chunk, "operands": k.slots // chunk, "codes": words(fmt, "k_codes")}
    return codes | {"slots": k.slots, "scale": words(fmt, "k_scale")}


# -- what packing takes in addition ------------------------------------------------------------------------------------
def _channel_pack(k: ChannelKeys) -> Constants:
    return {"block": largest_power(math.gcd(k.d * k.bits // 8, k.d))}


def _tile_pack(k: KeyCodec) -> Constants:
    """A slab is one tile."""
    return {"block": 0}


def _correction(k: Corrected) -> Constants:
    return {"rank": k.rank, "update": k.block, "lam": k.lam, "floor": float(k.floor)}


def _squat_pack(k: SQuatKeys) -> Constants:
    return {"block": largest_power(math.gcd(k.d * k.bits // 8, k.block))} | _correction(k)


def _boosted_squat_pack(k: BoostedSQuatKeys) -> Constants:
    return _tile_pack(k) | _correction(k)


def _hybrid_pack(k: HybridKeys) -> Constants:
    rule = {"mode": k.mode, "normed": bool(k.state_rows)}
    return {"block": largest_power(math.gcd(k.d * k.bits // 8, GROUP))} | rule


def _polar_pack(k: PolarKeys) -> Constants:
    return {"block": largest_power(math.gcd(k.pairs if k.nibbles else k.pairs * min(k.m, k.n) // 8, 16))}


# -- launches ----------------------------------------------------------------------------------------------------------
# One warp keeps every product within a warp, and two slabs per iteration need fewer instructions. If that takes more
# registers than a thread has, use one slab, half of InnerQ's denominators, or more warps. All of these were found by
# experiment: what spills differs between GPUs.
def _large(d: int, rows: int) -> bool:
    return d > 64 and rows > MIN_ROWS


def _channel_crowded(k: ChannelKeys, rows: int, chip: int) -> bool:
    return _large(k.d, rows) or (k.d > 128 and k.bits != 2)


def _boosted_crowded(k: BoostedKeys, rows: int, chip: int) -> bool:
    return _large(k.d, rows) or k.d > 128 or k.boosted > 32


def _hybrid_crowded(k: HybridKeys, rows: int, chip: int) -> bool:
    return _large(k.d, rows) or k.d > 128


def _polar_crowded(k: PolarKeys, rows: int, chip: int) -> bool:
    return _large(k.d, rows) or k.d > 128 or (not k.nibbles and k.d == 128 and 100 <= chip < 120)


def _transformed_crowded(k: TransformedKeys, rows: int, chip: int) -> bool:
    return _large(k.d, rows) or k.d > 128


def _hybrid_extra(k: HybridKeys, chip: int) -> int:
    return 8 if old_triton() or (k.d > 128 and chip < 100) else 16


def _slab_launch(fmt: PageFormat, k: KeyCodec, chip: int) -> Launch:
    return Launch(4, stages=3, fused=False)


def _tile_launch(fmt: PageFormat, k: KeyCodec, chip: int) -> Launch:
    """Launch of the kernel that packs a slab as one tile (triton_kernels/packing/tile.py)."""
    return Launch(TILE_WARPS, stages=3, fused=False)


def _squat_launch(fmt: PageFormat, k: SQuatKeys, chip: int) -> Launch:
    """More warps if the subspace takes registers; from 9.0 on, a larger register limit is used instead."""
    if k.bits * k.d <= 256:
        return _slab_launch(fmt, k, chip)
    if chip < 90 or old_triton():
        return Launch(16 if k.d > 128 else 8, stages=3, fused=False)
    return Launch(4 if k.d <= 128 and chip >= 100 else 8, stages=3, free=False, fused=False)


def _page_launch(fmt: PageFormat, k: PolarKeys, chip: int) -> Launch:
    """A page of PolarQuant is sorted as a whole."""
    return Launch(min(16, max(4 if k.d < 128 else 8, power_of_two(fmt.unit) // 16)), stages=3, fused=False)


# -- the tables --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeyEntry:
    """What the kernels know about one class of key codecs."""

    kind: int
    attend: Callable[[PageFormat, Any], Constants]
    pack: Callable[[Any], Constants]
    """Codec -> the constants of packing that `attend` does not have."""
    crowded: Callable[[Any, int, int], bool]
    """(codec, rows, chip) -> whether two slabs per iteration take too many registers."""
    launch: Callable[[PageFormat, Any, int], Launch]
    """The launch of packing on a GPU."""
    wide_rows: int = MAX_ROWS
    """Rows of a program above 128 channels: 16 only if they take fewer instructions than two programs of 8."""
    extra: Callable[[Any, int], int] = lambda k, chip: 16
    """(codec, chip) -> `Launch.extra`."""


def _fitted_or_not(codec: type[KeyCodec], entry: KeyEntry) -> dict[type, KeyEntry]:
    """Adds classes whose bytes have the same meaning."""
    return {codec: entry, variant(codec, Fitted): entry}


KEYS: dict[type, KeyEntry] = {
    **_fitted_or_not(
        ChannelKeys, KeyEntry(CHANNEL, _channel_attend, _channel_pack, _channel_crowded, _slab_launch, MIN_ROWS)
    ),
    **_fitted_or_not(
        SQuatKeys, KeyEntry(CHANNEL, _channel_attend, _squat_pack, _channel_crowded, _squat_launch, MIN_ROWS)
    ),
    **_fitted_or_not(
        BoostedKeys, KeyEntry(CHANNEL, _boosted_attend, _tile_pack, _boosted_crowded, _tile_launch, MIN_ROWS)
    ),
    **_fitted_or_not(
        BoostedSQuatKeys,
        KeyEntry(CHANNEL, _boosted_attend, _boosted_squat_pack, _boosted_crowded, _tile_launch, MIN_ROWS),
    ),
    HybridKeys: KeyEntry(
        HYBRID, _hybrid_attend, _hybrid_pack, _hybrid_crowded, _slab_launch, MIN_ROWS, extra=_hybrid_extra
    ),
    TransformedKeys: KeyEntry(
        TRANSFORMED, _transformed_attend, _tile_pack, _transformed_crowded, _tile_launch, MIN_ROWS
    ),
    PolarKeys: KeyEntry(POLAR, _polar_attend, _polar_pack, _polar_crowded, _page_launch),
    PaperPolarKeys: KeyEntry(POLAR, _paper_attend, _polar_pack, _polar_crowded, _page_launch),
}


def _token_values(fmt: PageFormat, v: TokenValues) -> Constants:
    return {"group": v.group, "scale": halves(fmt, "v_scale"), "zero": halves(fmt, "v_zero")}


def _rotated_values(fmt: PageFormat, v: Rotated) -> Constants:
    return _token_values(fmt, v) | {"rotated": block(v.d)}


def _searched_values(fmt: PageFormat, v: SearchedValues) -> Constants:
    step, most = (float(x) for x in widths(torch.tensor(v.bits)))
    # the one scale also stands for the zero
    scale = words(fmt, "v_scale")
    whole = {"searched": True, "group": v.d, "scale": scale, "zero": scale, "middle": -most / 2, "step": step}
    high = {"high": words(fmt, "v_high")} if v.bits > v.low else {}
    return whole | high | {"bits": v.low, "rotated": block(v.d)}


def _hybrid_values(fmt: PageFormat, v: HybridValues) -> Constants:
    return {"group": GROUP, "scale": halves(fmt, "v_scale"), "slot": words(fmt, "v_slot")}


VALUES: dict[type, tuple[int, Callable[[PageFormat, Any], Constants]]] = {
    TokenValues: (TOKEN, _token_values),
    variant(TokenValues, Fitted): (TOKEN, _token_values),
    variant(TokenValues, Rotated): (TOKEN, _rotated_values),
    variant(TokenValues, Rotated, Fitted): (TOKEN, _rotated_values),
    SearchedValues: (TOKEN, _searched_values),
    HybridValues: (HYBRID_VALUES, _hybrid_values),
}


@dataclass(frozen=True)
class State:
    """What `begin` (triton_kernels/step.py) keeps of a prompt."""

    of_keys: str | None = None
    """"NORM", of the largest magnitudes, or "ENERGY", of the squares."""
    of_queries: bool = False
    """SQuat's subspace, one row for each of its dimensions, and the noise."""


STATES: dict[type, State] = {
    HybridKeys: State("NORM"),
    SketchKeys: State("ENERGY"),
    **{
        found: State(of_queries=True)
        for codec in (SQuatKeys, BoostedSQuatKeys)
        for found in (codec, variant(codec, Fitted))
    },
}

"""What the C++ library knows about each codec: the one table of the CPU backend.

    codec class -> kind, numbers, fields of its pages, tables, the reduction behind `fit`

`bind` fills the library's `Layout` (csrc/cpu/layout.h) by the names that the library exports. A name that only one
side knows is an error, both when the library is first used and for every format, so the two can't drift apart.
Classes are looked up by their exact type: a subclass may store something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_kvq.formats import PageFormat, page
from vllm_kvq.formats.codec import KeyCodec
from vllm_kvq.formats.methods.innerq import HybridKeys, HybridValues
from vllm_kvq.formats.methods.kitty import LOW, BoostedKeys
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.methods.klt import DIGIT, SearchedValues, TransformedKeys
from vllm_kvq.formats.methods.lossless import RawKeys
from vllm_kvq.formats.methods.polar import PaperPolarKeys, PolarKeys, ThirdBit
from vllm_kvq.formats.methods.qjl import OneSketchKeys, SketchKeys
from vllm_kvq.formats.methods.squat import BoostedSQuatKeys, SQuatKeys, WideSubspace
from vllm_kvq.formats.methods.values import RawValues, Rotated, TokenValues
from vllm_kvq.formats.parts import quant, scales, turning
from vllm_kvq.formats.parts.search import widths
from vllm_kvq.formats.variant import Fitted, variant
from vllm_kvq.kernels.cpu import transformed
from vllm_kvq.kernels.cpu.fields import Fields
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.tuples import TUPLES
from vllm_kvq.kernels.slots import MAGIC as SIDE_MAGIC

NUMBERS = {
    "PAGE_MAGIC": page.MAGIC,
    "POSITION_AT": page.POSITION_AT,
    "FLAGS_AT": page.FLAGS_AT,
    "SIDE_MAGIC": SIDE_MAGIC,
    "LIMIT": int(quant.LIMIT),
    "SCALE_SHIFT": scales.SHIFT,
    "LARGEST_SCALE": scales.LARGEST,
    "SCALES_AROUND": scales.AROUND,
    "FINE": turning.FINE,
    "COARSE": turning.COARSE,
}
"""What both sides say, in the library's order."""

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Reduction:
    """What `fit` needs from all tokens of a chunk: a sum computed by the library, and the state derived from it."""

    name: str
    """The library's function, (tokens, heads, head_size) -> `shape`."""
    of_queries: bool
    dtype: torch.dtype
    shape: Callable[[int, int], tuple[int, ...]]
    """The sum's shape for the given KV heads and d."""
    finish: Callable[[Any, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    """(codec, the sum, tokens, previous state) -> state."""


Number = str | int | Callable[[Any], float]


@dataclass(frozen=True)
class Kind:
    """How the library serves one codec class."""

    name: str
    """The name of one of the library's kinds of keys, or of values."""
    fields: tuple[tuple[str, ...], ...]
    """The fields of a slab and a page; if options decide, one tuple for each choice."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """Name in the layout -> the codec's attribute, a constant, or a function of the codec."""
    tables: Callable[[Any], dict[str, np.ndarray]] | None = None
    table_names: tuple[str, ...] = ()
    reduction: Reduction | None = None

    @property
    def names(self) -> set[str]:
        return {*self.numbers, *self.table_names, *(name for choice in self.fields for name in choice)}

    def numbers_of(self, codec: Any) -> dict[str, float]:
        def number(of: Number) -> float:
            if isinstance(of, str):
                return getattr(codec, of)  # type: ignore[no-any-return]
            return of(codec) if callable(of) else of

        return {name: number(of) for name, of in self.numbers.items()}


_CPU = torch.device("cpu")


def _sketch(codec: SketchKeys) -> dict[str, np.ndarray]:
    return {"sketch": codec.sketch(_CPU).T.contiguous().numpy()}


def _sketches(codec: SketchKeys) -> dict[str, np.ndarray]:
    return {**_sketch(codec), "outer": codec.sketch_out(_CPU).T.contiguous().numpy()}


def _pairs(codec: PolarKeys) -> dict[str, np.ndarray]:
    return {"pairs": torch.stack([codec.x, codec.y]).to(torch.int32).numpy()}


def _step(codec: SearchedValues) -> float:
    return widths(torch.tensor(codec.bits))[0].item()


_GRAM = Reduction(
    "gram", True, torch.float64, lambda heads, d: (heads, d, d), lambda k, gram, _, state: k.fit_gram(gram, state)
)
_SQUARES = Reduction(
    "squares",
    False,
    torch.float64,
    lambda heads, d: (heads, d),
    lambda k, sums, tokens, state: k.fit_sums(sums.float(), tokens, state),
)
_LARGEST = Reduction(
    "largest",
    False,
    torch.float32,
    lambda heads, d: (heads, d),
    lambda k, top, _, state: k.fit_top(top.unsqueeze(1), state),
)

_CHANNEL = (("k_codes", "k_scale", "k_zero"),)
_BOOSTED = (("k_codes", "k_high", "k_scale", "k_zero"),)
_BOOST: dict[str, str | int] = {"key_bits": LOW, "boosted": "boosted"}
_RULE: dict[str, str | int] = {"lambda": "lam", "noise_floor": "floor", "squat_block": "block"}
_TOKEN = (("v_codes", "v_scale", "v_zero"),)
_GROUPS: dict[str, str | int] = {"value_bits": "bits", "group": "group"}
_POLAR: dict[str, str | int] = {"key_bits": "m", "radius_bits": "n"}
_PAPER: dict[str, str | int] = {**_POLAR, "paper": 1}
_GRID = ("k_angle0", "k_angle_step", "k_radius0", "k_radius_step")


def _per_channel(
    codec: type[KeyCodec],
    name: str,
    fields: tuple[tuple[str, ...], ...],
    numbers: Mapping[str, str | int],
    reduction: Reduction | None = None,
    same: tuple[type, ...] = (),
) -> dict[type, Kind]:
    """Range and fitted scales, without and with the changes in `same`, which do not matter to the library."""
    plain = Kind(name, fields, numbers, reduction=reduction)
    fitted = replace(plain, numbers={**numbers, "key_fitted": 1})
    changes = ((), *((change,) for change in same))
    return {
        variant(codec, *change, *scales): kind
        for change in changes
        for scales, kind in (((), plain), ((Fitted,), fitted))
    }


KEYS: dict[type, Kind] = {
    **_per_channel(ChannelKeys, "channel", _CHANNEL, {"key_bits": "bits"}),
    **_per_channel(BoostedKeys, "boosted", _BOOSTED, _BOOST),
    **_per_channel(SQuatKeys, "channel", _CHANNEL, {"key_bits": "bits", **_RULE}, _GRAM, (WideSubspace,)),
    **_per_channel(BoostedSQuatKeys, "boosted", _BOOSTED, {**_BOOST, **_RULE}, _GRAM, (WideSubspace,)),
    HybridKeys: Kind(
        "hybrid",
        (("k_codes", "k_scale", "k_slot", "k_inner_norm"),),
        {"key_bits": "bits", "key_mode": "mode"},
        reduction=_LARGEST,
    ),
    SketchKeys: Kind(
        "sketch",
        (("k_bits", "k_norm", "ko_bits", "ko_norm", "ko_index"),),
        {
            "key_bits": 1,
            "sketch_rows": "m",
            "outer_rows": "m_out",
            "outliers": "n",
            "sketch_scale": "scale",
            "outer_scale": "scale_out",
        },
        _sketches,
        ("sketch", "outer"),
        _SQUARES,
    ),
    OneSketchKeys: Kind(
        "sketch",
        (("k_bits", "k_norm"),),
        {"key_bits": 1, "sketch_rows": "m", "sketch_scale": "scale"},
        _sketch,
        ("sketch",),
    ),
    PolarKeys: Kind("polar", (("k_polar", *_GRID), ("k_angle", "k_radius", *_GRID)), _POLAR, _pairs, ("pairs",)),
    variant(PolarKeys, ThirdBit): Kind(
        "polar", (("k_angle", "k_angle_high", "k_radius", *_GRID),), _POLAR, _pairs, ("pairs",)
    ),
    PaperPolarKeys: Kind(
        "polar",
        (("k_polar", "k_radius_step"), ("k_angle", "k_radius", "k_radius_step")),
        _PAPER,
        _pairs,
        ("pairs",),
    ),
    variant(PaperPolarKeys, ThirdBit): Kind(
        "polar",
        (("k_angle", "k_angle_high", "k_radius", "k_radius_step"),),
        _PAPER,
        _pairs,
        ("pairs",),
    ),
    TransformedKeys: Kind(
        "transformed",
        (("k_codes", "k_scale"),),
        {"key_bits": DIGIT, "slots": "slots", "key_heads": "heads"},
        transformed.tables,
        transformed.TABLES,
    ),
    RawKeys: Kind("raw", (("k_raw",),)),
}
VALUES: dict[type, Kind] = {
    TokenValues: Kind("token", _TOKEN, _GROUPS),
    variant(TokenValues, Fitted): Kind("token", _TOKEN, {**_GROUPS, "value_fitted": 1}),
    variant(TokenValues, Rotated): Kind("token", _TOKEN, {**_GROUPS, "value_rotated": 1}),
    variant(TokenValues, Rotated, Fitted): Kind("token", _TOKEN, {**_GROUPS, "value_rotated": 1, "value_fitted": 1}),
    HybridValues: Kind("hybrid", (("v_codes", "v_scale", "v_slot"),), {"value_bits": "bits", "value_mode": "mode"}),
    SearchedValues: Kind(
        "searched",
        (("v_codes", "v_scale"), ("v_codes", "v_high", "v_scale")),
        {"value_bits": "bits", "group": "d", "value_rotated": 1, "value_step": _step},
    ),
    RawValues: Kind("raw", (("v_raw",),)),
}


@dataclass(frozen=True)
class Names:
    """The library's names, checked against this module's tables."""

    layout: Fields
    companions: Fields
    scores: Fields
    team: Fields
    keys: tuple[str, ...]
    values: tuple[str, ...]
    dtypes: tuple[str, ...]
    numbers: tuple[str, ...]
    tuples: tuple[str, ...]

    HEAD: ClassVar[frozenset[str]] = frozenset(
        ["bytes", "head_size", "d", "tokens", "record_bytes", "slabs_at", "slab_bytes", "raw_dtype", "keys", "values"]
    )
    """The names that every format has; the other names of a layout belong to codecs."""

    def __post_init__(self) -> None:
        kinds = [*KEYS.values(), *VALUES.values()]
        self.layout.check(self.HEAD.union(*(kind.names for kind in kinds)), "layout")
        for table, known, what in ((KEYS, self.keys, "keys"), (VALUES, self.values, "values")):
            if {kind.name for kind in table.values()} != {*known} or len({*known}) < len(known):
                raise ValueError(f"the library's kinds of {what} are {', '.join(known)}")
        if self.numbers != (said := tuple(f"{name}:{number}" for name, number in NUMBERS.items())):
            raise ValueError(f"the library's numbers are {', '.join(self.numbers)}, and not {', '.join(said)}")
        if {*DTYPES.values()} != {*self.dtypes}:
            raise ValueError(f"the library's types are {', '.join(self.dtypes)}")
        if self.tuples != (ours := tuple(f"{of.__name__}:{','.join(of._fields)}" for of in TUPLES)):
            raise ValueError(f"the library's tuples are {' '.join(self.tuples)}, and not {' '.join(ours)}")

    @classmethod
    def of(cls, lib: Any) -> Names:
        def words(what: str) -> str:
            return str(lib.names(what))

        layout, companions, scores, team = (Fields.parse(words(x)) for x in ("layout", "companions", "scores", "team"))
        lists = (tuple(words(what).split()) for what in ("keys", "values", "dtypes", "numbers", "tuples"))
        return cls(layout, companions, scores, team, *lists)


@functools.cache
def names() -> Names:
    """Of the library in use."""
    return Names.of(library())


_ALIGNMENT = 64


def lay_out(fmt: PageFormat, names: Names) -> torch.Tensor | None:
    """The bytes of the library's `Layout`, followed by its tables; None for a codec that it does not know."""
    keys, values = KEYS.get(type(fmt.keys)), VALUES.get(type(fmt.values))
    if keys is None or values is None:
        return None
    slab, page = fmt.slab_region, fmt.page_region
    offsets = {f.name: at for f, at in zip(slab.fields, slab.offsets, strict=True)}
    offsets |= {f.name: fmt.slabs_at - page.nbytes + at for f, at in zip(page.fields, page.offsets, strict=True)}
    for codec, kind in ((fmt.keys, keys), (fmt.values, values)):
        declared = {f.name for f in codec.slab_fields + codec.page_fields}
        if declared not in [{*choice} for choice in kind.fields]:
            raise ValueError(f"{type(codec).__name__} stores {', '.join(sorted(declared))}, unlike the library")
    tables = keys.tables(fmt.keys) if keys.tables else {}
    end = 8 * len(names.layout.names)
    placed = {}
    for name, table in tables.items():
        placed[name] = end = -(-end // _ALIGNMENT) * _ALIGNMENT
        end += table.nbytes
    given: dict[str, float] = {
        "bytes": end,
        "head_size": fmt.geometry.head_size,
        "d": fmt.geometry.d,
        "tokens": fmt.N,
        "record_bytes": fmt.record_bytes,
        "slabs_at": fmt.slabs_at,
        "slab_bytes": slab.nbytes,
        "raw_dtype": names.dtypes.index(DTYPES[fmt.geometry.dtype]),
        "keys": names.keys.index(keys.name),
        "values": names.values.index(values.name),
    }
    given |= keys.numbers_of(fmt.keys) | values.numbers_of(fmt.values) | offsets | placed
    absent = dict.fromkeys((n for kind in (*KEYS.values(), *VALUES.values()) for n in kind.names), 0)
    memory = np.zeros(end, np.uint8)
    head = names.layout.fill(absent | given, "layout")
    memory[: len(head)] = np.frombuffer(head, np.uint8)
    for name, at in placed.items():
        memory[at : at + tables[name].nbytes] = np.frombuffer(tables[name].tobytes(), np.uint8)
    return torch.from_numpy(memory)


# by identity, keeping the format alive so its id is not reused: hashing all settings would cost more than a
# call
_bound: dict[int, tuple[PageFormat, torch.Tensor | None]] = {}


def bind(fmt: PageFormat) -> torch.Tensor | None:
    """The format as passed in every call of the library; None if the PyTorch kernels serve it."""
    found = _bound.get(id(fmt))
    if found is None:
        if library() is None:
            return None
        found = _bound[id(fmt)] = (fmt, lay_out(fmt, names()))
    return found[1]


def reduction(fmt: PageFormat) -> Reduction | None:
    """What `fit` sums over a prompt's chunk; None for codecs that the library does not know, or that fit nothing."""
    kind = KEYS.get(type(fmt.keys))
    return kind.reduction if kind else None

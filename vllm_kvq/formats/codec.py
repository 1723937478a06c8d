"""The interface of a codec: one half (keys or values) of a format.

Its class declares a name and the options that it reads; `bind` creates it for one head geometry.
A bound codec turns (U, T, d) float32 into named fields and back, where U runs over pack units times KV heads and T is
the pack unit (32 tokens, or a whole page for codecs whose parameters span it). It knows nothing of pages, requests or
positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from vllm_kvq.formats.constants import Calibration, Constants, Moments
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Field, Packed, round_up
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.rope import PAIRINGS, Rope
from vllm_kvq.formats.parts.turning import Turning

LARGEST_BLOCK = 1024
"""Tokens of a page; a record's header has a byte for each of its slabs."""
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)


@dataclass(frozen=True)
class Geometry:
    """The geometry that a format is bound to: the attention layer's head and vLLM's block.

    A head size that is not a multiple of 32 (80, 112) is zero-padded to the next multiple inside the record; the
    padding costs memory and is counted in every bits figure.
    """

    head_size: int
    block_size: int
    dtype: torch.dtype = field(default_factory=lambda: torch.bfloat16)
    layer: int = 0
    pairing: str = "half"
    """How RoPE pairs channels: "half" (i, i + rotary_dim / 2) or "interleaved" (2i, 2i + 1)."""
    rotary_dim: int | None = None
    """Channels that RoPE rotates; all of them by default."""
    rope: Rope | None = None
    """The RoPE that codecs storing keys before RoPE undo; None: the keys that they get have had no RoPE applied."""
    constants: Constants | None = None
    """The constants of the layer's heads for calibrated codecs; without them (None) these can't pack anything."""

    def __post_init__(self) -> None:
        if self.head_size not in HEAD_SIZES:
            raise ValueError(f"head size {self.head_size} is not supported; supported are {list(HEAD_SIZES)}")
        if self.block_size < SLAB or self.block_size % SLAB:
            raise ValueError(f"block size {self.block_size} is not a multiple of {SLAB}; use --block-size 128")
        if self.block_size > LARGEST_BLOCK:
            raise ValueError(f"block size {self.block_size} is too large; the largest is {LARGEST_BLOCK}")
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"model dtype {self.dtype} is not supported; use float16, bfloat16 or float32")
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing {self.pairing!r} is not one of {', '.join(map(repr, PAIRINGS))}")
        if self.rope is not None and self.rope.rotary_dim > self.head_size:
            raise ValueError(f"RoPE of {self.rope.rotary_dim} channels does not fit head size {self.head_size}")
        rotary = self.rotary
        if rotary % 2 or not 0 < rotary <= self.head_size:
            raise ValueError(f"rotary_dim {rotary} does not fit head size {self.head_size}")

    @property
    def d(self) -> int:
        """Channels as stored."""
        return round_up(self.head_size, SLAB)

    @property
    def rotary(self) -> int:
        return self.head_size if self.rotary_dim is None else self.rotary_dim


class Codec(ABC):
    """See the module's docstring. Field names carry the prefix "k_" or "v_"."""

    name: ClassVar[str]
    """The name that users write: `{"keys": "squat"}`."""

    title: ClassVar[str]
    """A few words on what it stores, for tables."""

    options: ClassVar[tuple[Option, ...]] = ()
    """The options that it reads, in addition to those that every format has."""

    public: ClassVar[bool] = True
    """Whether users may choose it, in any format."""

    page_wide = False
    """Whether parameters span the page, so that only a complete page can be packed."""

    state_rows = 0
    """Rows of d float32 that a request carries per KV head (SQuat's U, InnerQ's norm)."""

    reference_only: ClassVar[str | None] = None
    """Why it can be measured but not served, in a sentence for users; None: it can be served."""

    calibrated: ClassVar[bool] = False
    """Whether it has constants, fitted to a text other than those that it packs (`geometry.constants`). Once bound, it
    packs the KV heads of one layer: of the units times heads that it gets, heads vary fastest."""

    tells_decode = False
    """Whether `pack_decoded` differs from `pack`."""

    @abstractmethod
    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        """`options` are the codec's own, complete; raises ValueError if the head does not allow them."""

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        """The codec for one head; overridden by classes whose options select another class."""
        return cls(geometry, options)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        """(KV heads, ...) float32; `options` are the codec's own, complete. Only calibrated codecs implement it."""
        raise TypeError(f"{cls.__name__} is not calibrated")

    @classmethod
    def fit_moments(cls, moments: Moments, turning: Turning | None = None) -> torch.Tensor:
        """The same from sums over the text, whatever the options are: for calibrated codecs that can be served.
        `turning`: that of the moments' phases; None: keys are taken not to be turned."""
        raise TypeError(f"{cls.__name__} is not fitted to sums")

    @property
    @abstractmethod
    def slab_fields(self) -> tuple[Field, ...]:
        """Stored once per 32 tokens."""

    @property
    def page_fields(self) -> tuple[Field, ...]:
        """Stored once per page."""
        return ()

    @abstractmethod
    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        """(U, T, d) float32 [and (U, state_rows, d)] -> slab fields (U, T / 32, ...) and page fields (U, ...)."""

    def pack_decoded(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        """`pack` for tokens that are completed by a decode step rather than a chunk of a prompt."""
        return self.pack(x, state)

    @abstractmethod
    def unpack(self, fields: Packed) -> torch.Tensor:
        """Slab fields (U, s, ...) and page fields (U, ...) -> (U, 32 * s, d) float32."""


class KeyCodec(Codec):
    pairs_channels: ClassVar[bool] = False
    """Whether it depends on which channels RoPE rotates together (`geometry.pairing`); it then also reads `PAIRING`."""

    before_rope: ClassVar[bool] = False
    """Whether it stores keys as they are before RoPE. If so, the caller undoes RoPE on keys before packing and on
    queries before `fit`, and applies it again to keys that are read (`geometry.rope`, formats/page.py). Servers don't,
    so such a codec must be `reference_only`."""

    hurt_by_biases: ClassVar[str | None] = None
    """Why keys with a large constant part (a key projection's bias) are stored badly, as a phrase that completes
    "because it". None: a constant does no harm, for example because channels have their own zero."""

    placed: ClassVar[bool] = False
    """Whether keys are packed less a mean that is known from their position. If so, the caller takes `mean_at` off keys
    before packing, and `unpack` and `key_features` get the position of a unit's first token as fields["position"]."""

    fits_queries = False
    """Whether `fit` uses the queries: needlessly widening those of a long prompt costs more than the fit."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.before_rope and cls.reference_only is None:
            raise TypeError(
                f"{cls.__name__} declares before_rope, which no server supports; declare reference_only too"
            )

    def fit(self, queries: torch.Tensor, keys: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The request's state after one more chunk of its prompt.

        queries (H, n * group, d) and keys (H, n, d) are the chunk's, float32, before RoPE if `before_rope` is set, else
        after it; `state` (H, state_rows, d) is that after the previous chunks, None for the first. Only codecs with
        state_rows > 0 implement it.
        """
        raise TypeError(f"{type(self).__name__} keeps no state")

    def page_state(self, fields: Packed) -> torch.Tensor | None:
        """The state that a page was started with, if later slabs of the page must use it, too: (U, state_rows, d)."""
        return None

    def mean_at(self, position: torch.Tensor, tokens: int) -> torch.Tensor:
        """(U, tokens, d): what is taken off units whose first tokens have these positions (U,). Only if `placed`."""
        raise TypeError(f"{type(self).__name__} does not depend on positions")

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        """f(q) with q . unpack(page) == f(q) . key_features(page); (..., KV heads, rows, d) -> (..., F)."""
        return query

    def key_features(self, fields: Packed) -> torch.Tensor:
        return self.unpack(fields)


class ValueCodec(Codec):
    pass

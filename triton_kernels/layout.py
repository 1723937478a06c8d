"""What the kernels know of a format when they are compiled: a record, its keys and values, and their companion's slots.

A kernel takes each of these as one constant: R, K, V and C. Plain Python, without Triton; kernels/gpu/triton/layout.py
fills them in for each codec. Offsets are counted from the first byte of what they lie in, in 32-bit words or in halves,
which are float16 numbers. What a kind of keys or values does not have is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANNEL, HYBRID, POLAR, TRANSFORMED = range(4)
"""Kinds of keys: SQuat's, KIVI's and Kitty's, InnerQ's, PolarQuant's, those of transform coding."""

TOKEN, HYBRID_VALUES = range(2)
"""Kinds of values: per token, and InnerQ's."""


@dataclass(frozen=True)
class Record:
    """What a page holds for one KV head."""

    head: int
    """The head size."""
    d: int
    """The channels that are packed: the head size and its padding."""
    columns: int
    """The power of two that holds d."""
    slabs: int
    slabs_at: int
    """Words before the first slab."""
    slab_words: int
    unit: int
    """Tokens that are packed together."""
    tokens: int
    """The power of two that holds a unit."""


@dataclass(frozen=True)
class Keys:
    kind: int
    bits: int
    codes: int
    """Words. PolarQuant's angles, or angles and radii where they share a byte."""
    chunk: int
    """Channels, or pairs, in one step of a matrix product; they lie in one plane."""
    operands: int
    """Chunks of a query."""
    block: int = 0
    """Packing: channels in one plane, and in one block of SQuat's or group of InnerQ's; 0: a slab is a tile."""
    scale: int = 0
    """Halves. Of transformed keys: words."""
    fitted: bool = False
    """Packing: whether scales and zeros are those with the least error, and not those of the range."""

    zero: int = 0
    """Halves. SQuat, KIVI and Kitty."""
    high: int = 0
    """Words. The boosted channels' high digits."""
    boosted: int = 0
    """Kitty's and SQuat's boosted channels of a slab."""

    rank: int = 0
    """SQuat's: the dimensions of the subspace; 0: no correction."""
    update: int = 0
    """The channels of a block; each corrects what those before it did."""
    lam: float = 1.0
    floor: float = 0.0

    slot: int = 0
    """Words. InnerQ's zeros or signs."""
    norm: int = 0
    """Halves of the page. InnerQ's norms."""
    normed: bool = False
    """Packing: whether a new page takes its norms from the state."""
    mode: int = 0
    """Packing: InnerQ's groups are 0 the better of both, 1 symmetric, 2 asymmetric."""

    radius: int = 0
    """Words. PolarQuant's radii, where they have bytes of their own."""
    radius_bits: int = 0
    angle0: int = 0
    """Halves of the page, as the next three. PolarQuant's grid."""
    angle_step: int = 0
    radius0: int = 0
    radius_step: int = 0
    paper: bool = False
    rotary: int = 0
    """Channels that RoPE turns, and with which channel each is paired."""
    interleaved: bool = False

    slots: int = 0
    """Places for the digits of a transformed key."""

    @property
    def channel(self) -> bool:
        return self.kind == CHANNEL

    @property
    def hybrid(self) -> bool:
        return self.kind == HYBRID

    @property
    def polar(self) -> bool:
        return self.kind == POLAR

    @property
    def transformed(self) -> bool:
        return self.kind == TRANSFORMED


@dataclass(frozen=True)
class Values:
    kind: int
    bits: int
    group: int
    """Channels with one scale and zero; InnerQ: tokens."""
    codes: int
    """Words."""
    scale: int
    """Halves. Of searched values: words."""
    block: int
    """Channels that lie in one plane and in one group, at most four per lane."""
    places: int
    """The rows of a block's accumulator."""
    zero: int = 0
    """Halves. Zeros per token."""
    fitted: bool = False
    """Packing: as for keys."""
    rotated: int = 0
    """The size of the blocks in which values are rotated."""

    slot: int = 0
    """Words. InnerQ's zeros or signs."""
    mode: int = 0
    """Packing: as for keys."""

    searched: bool = False
    """Whether the one scale per token was searched for, and is one byte. It then is the zero, too."""
    high: int = 0
    """Words. The highest bits of searched values of three bits."""
    middle: float = 1.0
    """What the zero is multiplied by: for searched values, minus half of the largest code."""
    step: float = 1.0
    """What a value is multiplied by at last: the distance of searched values' levels."""

    @property
    def by_token(self) -> bool:
        return self.kind == TOKEN


@dataclass(frozen=True)
class Companion:
    """The blocks next to a layer's pages (kernels/slots.py). A slot is one token of all `heads` KV heads."""

    heads: int
    per_block: int
    """Slots of a block."""
    slot: int
    """Elements of a slot."""
    words: int
    """Words of a slot."""
    header: int
    """Words from the beginning of a request's first block to its header."""
    state_at: int
    """The state's first slot."""
    ring: int
    """Slots of the ring."""
    ring_at: int
    """The ring's first slot."""
    sidecar_blocks: int
    """Blocks of a request's sidecar."""

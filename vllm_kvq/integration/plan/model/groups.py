"""How vLLM puts a model's layers into KV cache groups, and what a request takes of the pool that these share.

A group has one block table per request, and a block of the pool holds one page of each of its layers. All blocks are as
large as those of the widest group; what narrower groups leave of them is not used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, and what a request of the maximum length takes in each of them."""

    layers: int
    blocks: int
    page_bytes: int
    """Bytes of a page in one layer."""
    plain_bytes: int
    """What it would take in a plain 16-bit cache, in one layer."""
    freed: int = 0
    """Those of the blocks that it takes only while its prompt is computed."""
    plain_freed: int = 0
    """The same for `plain_bytes`."""
    apart: bool = False
    """Whether they are in other KV cache groups than the layers with full attention: those with a window or a state."""
    packed: bool = False
    """Whether they have companions, whose pages are as large as theirs."""


@dataclass(frozen=True)
class Pool:
    """What the kinds of layers of one server make of its pool."""

    kinds: tuple[Kind, ...]
    """The packed layers' first."""
    sinks: bool
    """Whether packed layers have sink pages."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool: one page of each layer of the widest KV cache group."""
        return max(self._full_bytes, *(-(-kind.layers // n) * kind.page_bytes for kind, n in self.apart), 0)

    @property
    def per_request(self) -> int:
        """The most blocks that a request of the maximum length takes."""
        # layers with full attention share their blocks, and only packed ones have companions
        return self.kinds[0].blocks + sum(n * kind.blocks for kind, n in self.apart)

    @property
    def freed(self) -> int:
        """Those that it takes only while its prompt is computed."""
        return sum(n * kind.freed for kind, n in self.apart)

    @property
    def apart(self) -> list[tuple[Kind, int]]:
        """How many KV cache groups vLLM makes of the layers of each kind that is apart from those with full
        attention."""
        apart = [kind for kind in self.kinds if kind.apart]
        if not apart:
            return []
        full, packed = Counter[int](), Counter[int]()
        for kind in self.kinds:
            if not kind.apart:
                full[kind.page_bytes] += kind.layers
            if kind.packed:
                packed[kind.page_bytes] += kind.layers
        # the layers with full attention, the sidecars, the sinks
        together = [full, packed, *([packed] if self.sinks else [])]
        alike = [counts for counts in together if len({*counts.values()}) == 1]
        if any(len(counts) > 1 for counts in alike):
            # Equal numbers of layers of each size are a pattern for vLLM, and groups hold the number of repeats that
            # needs the least padding in all.
            repeated = [next(iter(counts.values())) for counts in alike]
            least = max(n for n, counts in zip(repeated, alike, strict=True) if len(counts) > 1)
            layers = [*repeated, *(kind.layers for kind in apart)]
            repeats = min(range(least, max(layers) + 1), key=lambda size: (sum(-n % size for n in layers), -size))
            return [(kind, -(-kind.layers // repeats)) for kind in apart]
        # else as many groups as keep them from being wider than the widest that can't be split
        widest = max(self._full_bytes, *(kind.page_bytes for kind in apart))
        return [(kind, -(-kind.layers // (widest // kind.page_bytes))) for kind in apart]

    @property
    def _full_bytes(self) -> int:
        """One page of each layer with full attention."""
        return sum(kind.layers * kind.page_bytes for kind in self.kinds if not kind.apart)

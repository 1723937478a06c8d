"""What a server serves: one frozen object, which `plan.py` makes from vLLM's configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.table import changed, label
from vllm_kvq.integration.plan.calibration import Source
from vllm_kvq.integration.plan.drafts import Draft
from vllm_kvq.integration.plan.model.groups import Kind, Pool
from vllm_kvq.integration.plan.model.heads import Heads
from vllm_kvq.integration.plan.model.layers import Layers
from vllm_kvq.integration.plan.model.states import States
from vllm_kvq.integration.plan.options import Options
from vllm_kvq.kernels.paths import Path
from vllm_kvq.kernels.slots import SlotGeometry


@dataclass(frozen=True)
class Part:
    """Packed layers that have the same options; all of them, unless some option is given by layer."""

    layers: tuple[int, ...]
    format: PageFormat
    """With its options, N, W and S. It lacks what only the loaded model has: a layer's number, RoPE's pairs."""
    slots: SlotGeometry
    """The KV heads of one rank, their size and dtype, the bytes of a page, and how sidecars are cut."""


@dataclass(frozen=True)
class Served:
    options: Options
    """What the user asked for."""
    parts: tuple[Part, ...]
    layers: Layers
    """Which layers are packed, and which stay in 16 bits and why."""
    skipped_heads: tuple[Heads, ...]
    """The heads of each layer in `layers.skipped`."""
    window_heads: tuple[Heads, ...]
    """The heads of each layer in `layers.windows`."""
    draft: Draft | None
    states: States | None
    """What a hybrid's other layers keep."""
    recomputed: int
    """Tokens at a request's end that no prefix hit covers."""
    max_len: int
    window_tokens: int
    """The most tokens of a long request that a layer with a sliding window holds while its prompt is computed."""
    decode_tokens: int
    """The same for a request whose prompt has been computed."""
    window_block: int
    """Tokens of a page in these layers."""
    ranks: int
    """Ranks that share the heads of a layer."""
    path: Path
    """Which kernels serve the packed layers, and why faster ones do not."""
    calibration: Source | None
    """Where a calibrated format's constants come from."""
    fingerprint: str
    """What its pages mean, in one word (fingerprint.py)."""

    @property
    def format(self) -> PageFormat:
        """The first part's, for what all have in common: name, N, W, S, heads."""
        return self.parts[0].format

    @property
    def label(self) -> str:
        """The format's name, and what the user's options make of it in all parts: `kitty2:key_bits=4,keys=squat`."""
        first, *others = (changed(self.format.name, part.format.settings) for part in self.parts)
        return label(self.format.name, {o: v for o, v in first.items() if all(other.get(o) == v for other in others)})

    @property
    def copies(self) -> int:
        """Packed layers times ranks: each block of the pool is one page in each of them."""
        return self.layers.packed * self.ranks

    @property
    def bits_per_element(self) -> float:
        return self._mean([part.format.bits_per_element for part in self.parts])

    @property
    def page_bytes(self) -> float:
        """Bytes of a page of the pool in one layer, on average."""
        return self._mean([part.slots.page_bytes for part in self.parts])

    def _mean(self, of_parts: Sequence[float]) -> float:
        """Over layers."""
        counts = [len(part.layers) for part in self.parts]
        if len(of_parts) == 1:
            return of_parts[0]
        return sum(n * x for n, x in zip(counts, of_parts, strict=True)) / sum(counts)

    @property
    def sidecar_blocks(self) -> int:
        """Blocks per request, the same in all layers: they share one block table."""
        return max(part.slots.sidecar_blocks for part in self.parts)

    @property
    def sink_blocks(self) -> int:
        return max(part.slots.sink_blocks for part in self.parts)

    @property
    def sizes(self) -> int:
        """How many sizes the pages of packed layers have."""
        return len({part.slots.page_bytes for part in self.parts})

    @property
    def mixed(self) -> bool:
        """Whether pages of several sizes lie side by side: of several formats, or packed ones and others."""
        return bool(self.layers.kept) or self.draft is not None or self.states is not None or self.sizes > 1

    @property
    def not_packed(self) -> tuple[str, ...]:
        """What stays in 16 bits, as the start-up line names it."""
        return (*self.layers.kept, *(("draft",) if self.draft else ()))

    @property
    def pool(self) -> Pool:
        return Pool(self.kinds, bool(self.sink_blocks))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        slots, length, block = self.parts[0].slots, self.max_len, self.format.N
        plain = 4 * slots.heads * slots.head_size
        whole = -(-length // block)
        packed = whole + self.sidecar_blocks + self.sink_blocks
        kinds = [Kind(len(p.layers), packed, p.slots.page_bytes, length * plain, packed=True) for p in self.parts]
        for heads, layers in Counter(self.skipped_heads).items():
            kinds.append(Kind(layers, whole, block * slots.itemsize * heads.elements, 2 * length * heads.elements))
        for heads, layers in Counter(self.window_heads).items():
            # as vLLM counts a window: one block more, because it may begin in the middle of one
            seen, kept = (min(tokens, length) for tokens in (self.window_tokens, self.decode_tokens))
            blocks, plain = -(-seen // self.window_block) + 1, 2 * heads.elements
            freed = max(0, blocks - (-(-(kept - 1) // self.window_block) + 1))
            page = self.window_block * slots.itemsize * heads.elements
            kinds.append(Kind(layers, blocks, page, seen * plain, freed, (seen - kept) * plain, apart=True))
        if states := self.states:
            count, size, freed = states.blocks, states.nbytes, states.blocks - states.kept
            kinds.append(Kind(states.layers, count, size, count * size, freed, freed * size, apart=True))
        if draft := self.draft:
            own = length * 4 * draft.heads * draft.head_size
            kinds.append(Kind(draft.layers, whole, block * draft.token_bytes, own))
        return tuple(kinds)

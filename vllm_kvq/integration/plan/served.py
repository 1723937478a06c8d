"""What a server serves: one frozen object, made here from vLLM's configuration, and nowhere else.

`platform.py` makes it in the process that the user sees and has `apply` write into vLLM's configuration what vLLM has
to know. Workers receive that configuration and make the same object from it while they load the model: it follows from
the configuration alone, and nothing that `apply` writes changes it. (Once vLLM has allocated its caches it is too late:
`block_size` is then that of the smallest group, a draft's for example.)
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_kvq.formats import Geometry, PageFormat
from vllm_kvq.formats.by_layer import options_at, schedules, written
from vllm_kvq.formats.codec import LARGEST_BLOCK
from vllm_kvq.formats.table import DEFAULT_N
from vllm_kvq.integration.plan.connectors import choose_connector
from vllm_kvq.integration.plan.drafts import Draft
from vllm_kvq.integration.plan.groups import Kind, Pool
from vllm_kvq.integration.plan.heads import Heads
from vllm_kvq.integration.plan.layers import Layers, chunk_problem
from vllm_kvq.integration.plan.options import bind, kvq_options, settings_of
from vllm_kvq.integration.plan.states import States
from vllm_kvq.kernels.paths import Path, Wish, path_for
from vllm_kvq.kernels.slots import SlotGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_BLOCK = 128
LEAST_WINDOW_BLOCK = 16
"""Tokens of a page that vLLM's attention kernels read; those for CPUs: twice as many."""
HARDLY_MORE = 1.05
"""So much more memory than the least may pages of more tokens take in layers with a window."""


_counting: ContextVar[bool] = ContextVar("counting", default=False)


@contextmanager
def counting() -> Iterator[None]:
    """Where formats that can be measured only are counted as if a server could start with them."""
    before = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(before)


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
    parts: tuple[Part, ...]
    layers: Layers
    """Which layers are packed, and which stay in 16 bits and why."""
    skipped_heads: tuple[Heads, ...]
    """Of each layer in `layers.skipped`."""
    window_heads: tuple[Heads, ...]
    """Of each layer in `layers.windows`."""
    draft: Draft | None
    states: States | None
    """What a hybrid's other layers keep."""
    recomputed: int
    """So many tokens at a request's end no prefix hit covers."""
    max_len: int
    window_tokens: int
    """The most tokens of a long request that a layer with a sliding window holds while its prompt is computed."""
    decode_tokens: int
    """The same of a request whose prompt is computed."""
    window_block: int
    """Tokens of a page in these layers."""
    ranks: int
    """That share the heads of a layer."""
    path: Path
    """Which kernels serve the packed layers, and why faster ones do not."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Served:
        """Raises ValueError, with a sentence, where the parts of the configuration do not fit together."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        layers, draft, states = Layers.of(vllm_config), Draft.of(vllm_config), States.of(vllm_config)
        if problem := layers.problem():
            raise ValueError(problem)
        for schedule in schedules(kvq_options(vllm_config)):
            schedule.check(layers.packed_layers, layers.total)
        parts = parts_of(vllm_config, layers, _block(vllm_config, layers, states))
        window_blocks = _window_blocks(model.attention_chunk_size, parts[0].format.N)
        if problem := chunk_problem(model.attention_chunk_size, window_blocks, parts[0].format.N):
            raise ValueError(problem)
        for part in parts if not _counting.get() else ():
            if problem := part.format.keys.reference_only or part.format.values.reference_only:
                raise ValueError(problem)
        window = model.get_sliding_window() or model.attention_chunk_size or model.max_model_len
        served = cls(
            parts,
            layers,
            tuple(Heads.of(vllm_config, layer) for layer in sorted(layers.skipped)),
            tuple(Heads.of(vllm_config, layer) for layer in sorted(layers.windows)),
            draft,
            states,
            recomputed=_recomputed(vllm_config, parts[0].format, layers, states),
            max_len=model.max_model_len,
            window_tokens=window - 1 + vllm_config.max_in_flight_tokens,
            decode_tokens=window - 1 + vllm_config.max_concurrent_batches * (1 + vllm_config.num_speculative_tokens),
            window_block=parts[0].format.N,
            ranks=parallel.tensor_parallel_size,
            path=path_of(parts, Wish.of(vllm_config.device_config.device_type, os.environ), capped(model)),
        )
        if served.sizes > 1 and parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "options given by layer make pages of several sizes, which do not work with pipeline parallelism; "
                "use --tensor-parallel-size"
            )
        return replace(served, window_block=_window_block(served, window_blocks)) if layers.windows else served

    @property
    def format(self) -> PageFormat:
        """Of the first part, for what all have in common: name, N, W, S, heads."""
        return self.parts[0].format

    @property
    def copies(self) -> int:
        """Packed layers times ranks: each block of the pool is one page in each of them."""
        return self.layers.packed * self.ranks

    @property
    def bits_per_element(self) -> float:
        return self._mean([part.format.bits_per_element for part in self.parts])

    @property
    def page_bytes(self) -> float:
        """Of a page of the pool in one layer, on average."""
        return self._mean([part.slots.page_bytes for part in self.parts])

    def _mean(self, of_parts: Sequence[float]) -> float:
        """Over layers."""
        counts = [len(part.layers) for part in self.parts]
        if len(of_parts) == 1:
            return of_parts[0]
        return sum(n * x for n, x in zip(counts, of_parts, strict=True)) / sum(counts)

    @property
    def sidecar_blocks(self) -> int:
        """Of a request, the same in all layers: they share one block table."""
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
        """Whether pages of several sizes lie side by side: packed ones of several formats, or beside other layers."""
        return bool(self.layers.kept) or self.draft is not None or self.states is not None or self.sizes > 1

    @property
    def exempt(self) -> tuple[str, ...]:
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


def parts_of(vllm_config: VllmConfig, layers: Layers, block: int) -> tuple[Part, ...]:
    """The packed layers by their options, in pages of `block` tokens; one part without layers where none is packed."""
    # all packed layers have such heads (refusals.py)
    heads = Heads.of(vllm_config, next(iter(layers.packed_layers), 0))
    geometry = Geometry(heads.size, block, vllm_config.model_config.dtype)
    options = kvq_options(vllm_config)
    alike: dict[str, list[int]] = {}
    for layer in layers.packed_layers:
        alike.setdefault(json.dumps(options_at(options, layer), sort_keys=True), []).append(layer)
    parts = []
    for members in alike.values() or [[]]:
        fmt = bind(vllm_config, replace(geometry, layer=members[0] if schedules(options) else 0))
        slots = SlotGeometry.of(fmt, heads.count, vllm_config.num_speculative_tokens)
        parts.append(Part(tuple(members), fmt, slots))
    return tuple(parts)


def capped(model: Any) -> bool:
    """Whether attention scores have a soft cap."""
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def path_of(parts: Sequence[Part], wish: Wish, capped: bool) -> Path:
    """One path for all layers: the slowest that any of them needs, and why."""
    if len(parts) == 1:
        return path_for(parts[0].format, wish, capped)
    found = {written(part.layers): path_for(part.format, wish, capped) for part in parts}
    slowest = max(found.values(), key=lambda path: path.rank)
    why = [f"for {layers} {path.why}" for layers, path in found.items() if path.why and path.rank == slowest.rank]
    slow = [f"in {layers} {path.slow}" for layers, path in found.items() if path.slow and path.rank == slowest.rank]
    return Path(slowest.name, "; ".join(why) or None, "; ".join(slow) or None)


def _recomputed(vllm_config: VllmConfig, fmt: PageFormat, layers: Layers, states: States | None) -> int:
    """The user's number; else W, so that the window is exact after a hit, too.

    Beside layers with a sliding window or a state 0: vLLM keeps of these what the end of a prompt sees, where a hit
    that ends earlier would find nothing.
    """
    chosen = settings_of(vllm_config).recompute
    if chosen is not None:
        return chosen
    return 0 if layers.windows or states else fmt.W


def _block(vllm_config: VllmConfig, layers: Layers, states: States | None) -> int:
    """Tokens of a page. A block of the pool has a page of each packed layer, or a state."""
    cache, option = vllm_config.cache_config, settings_of(vllm_config).N
    if option is not None or cache.user_specified_block_size:
        return option or int(cache.block_size)
    from vllm.platforms import current_platform

    # vLLM's own default on the CPU (0.32 sets it, 0.33 leaves it open), ours elsewhere
    block = CPU_BLOCK if current_platform.is_cpu() else DEFAULT_N
    # smaller pages beside a state would waste most of each block
    while states is not None and block < LARGEST_BLOCK:
        parts = parts_of(vllm_config, layers, block)
        if sum(len(part.layers) * part.slots.page_bytes for part in parts) >= states.nbytes:
            break
        block *= 2
    return block


def _window_blocks(chunk: int | None, block: int) -> list[int]:
    """The numbers of tokens that a page of a layer with a window may have, beside packed pages of `block` tokens."""
    from vllm.platforms import current_platform

    least = LEAST_WINDOW_BLOCK * (2 if current_platform.is_cpu() else 1)
    return [tokens for tokens in range(least, block + 1, least) if block % tokens == 0 and not (chunk or 0) % tokens]


def _window_block(served: Served, sizes: Sequence[int]) -> int:
    """The most tokens with which a request takes hardly more memory than with any other number.

    The fewer, the better they fill the blocks of the pool, and the more blocks vLLM's scheduler has to hand out.
    """
    pools = {tokens: replace(served, window_block=tokens).pool for tokens in sizes}
    taken = {tokens: (pool.per_request - pool.freed) * pool.block_bytes for tokens, pool in pools.items()}
    return max(tokens for tokens, nbytes in taken.items() if nbytes <= HARDLY_MORE * min(taken.values()))


def apply(served: Served, vllm_config: VllmConfig) -> None:
    """Write into vLLM's configuration what it has to know, and nothing else does: the rows of patches/settings.py."""
    cache = vllm_config.cache_config
    # As if the user had set it: otherwise vLLM asks the backend for a block size once the model is loaded, when formats
    # are bound to this one.
    cache.block_size, cache.user_specified_block_size = served.format.N, True
    if cache.mamba_cache_mode == "align":
        # With prefix caching a state is kept at the end of a block; vLLM has read the block size before us.
        cache.mamba_block_size = served.format.N
    # The layers whose dtype vLLM then makes "auto": window layers are not in the user's list.
    cache.kv_cache_dtype_skip_layers = list(served.layers.kept)
    if served.draft is not None and vllm_config.speculative_config.kv_cache_dtype is None:
        # Otherwise vLLM hands the target's dtype to the draft, too.
        vllm_config.speculative_config.kv_cache_dtype = "auto"
    choose_connector(vllm_config)

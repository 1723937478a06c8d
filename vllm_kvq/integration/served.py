"""What a server serves: one frozen object, made here from vLLM's configuration, and nowhere else.

`platform.py` makes it in the process that the user sees and has `apply` write into vLLM's configuration what vLLM has
to know. Workers receive that configuration and make the same object from it while they load the model: it follows from
the configuration alone, and nothing that `apply` writes changes it. (Once vLLM has allocated its caches it is too late:
`block_size` is then that of the smallest group, a draft's for example.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm_kvq.formats import Geometry, PageFormat
from vllm_kvq.formats.codec import LARGEST_BLOCK
from vllm_kvq.formats.table import DEFAULT_N
from vllm_kvq.integration.drafts import Draft
from vllm_kvq.integration.kept import Layers
from vllm_kvq.integration.setup import bind, settings_of
from vllm_kvq.integration.states import States
from vllm_kvq.kernels.paths import Path, Wish, path_for
from vllm_kvq.kernels.slots import SlotGeometry

CPU_BLOCK = 128


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, and what a request of the maximum length takes in each of them."""

    layers: int
    blocks: int
    page_bytes: int
    """Of a page in one layer."""
    plain_bytes: int
    """What it would take in a plain 16-bit cache, in one layer."""
    apart: bool = False
    """Whether they are in other KV cache groups than the layers with full attention: those with a window or a state."""


@dataclass(frozen=True)
class Served:
    format: PageFormat
    """With its options, N, W and S. It lacks what only the loaded model has: a layer's number, RoPE's pairs."""
    slots: SlotGeometry
    """The KV heads of one rank, their size and dtype, the bytes of a page, and how sidecars are cut."""
    layers: Layers
    """Which layers are packed, and which stay in 16 bits and why."""
    draft: Draft | None
    states: States | None
    """What a hybrid's other layers keep."""
    recomputed: int
    """So many tokens at a request's end no prefix hit covers."""
    max_len: int
    window_tokens: int
    """The most tokens of a long request that a layer with a sliding window holds."""
    copies: int
    """Packed layers times ranks: each block of the pool is one page in each of them."""
    path: Path
    """Which kernels serve the packed layers, and why faster ones do not."""

    @classmethod
    def of(cls, vllm_config: Any) -> Served:
        """Raises ValueError, with a sentence, where the parts of the configuration do not fit together."""
        model = vllm_config.model_config
        heads = model.get_num_kv_heads(vllm_config.parallel_config)
        layers, draft, states = Layers.of(vllm_config), Draft.of(vllm_config), States.of(vllm_config)
        if problem := layers.problem():
            raise ValueError(problem)
        block = _block(vllm_config, heads * layers.packed, states)
        fmt = bind(vllm_config, Geometry(model.get_head_size(), block, model.dtype))
        window = model.get_sliding_window() or model.attention_chunk_size or model.max_model_len
        return cls(
            fmt,
            SlotGeometry.of(fmt, heads, vllm_config.num_speculative_tokens),
            layers,
            draft,
            states,
            recomputed=_recomputed(vllm_config, fmt, layers, states),
            max_len=model.max_model_len,
            window_tokens=window - 1 + vllm_config.max_in_flight_tokens,
            copies=layers.packed * vllm_config.parallel_config.tensor_parallel_size,
            path=path_for(fmt, Wish.of(vllm_config.device_config.device_type, os.environ)),
        )

    @property
    def page_bytes(self) -> int:
        """Of a page of the pool in one layer."""
        return self.slots.page_bytes

    @property
    def mixed(self) -> bool:
        """Whether there are other layers beside packed ones, with pages of other sizes."""
        return bool(self.layers.kept) or self.draft is not None or self.states is not None

    @property
    def exempt(self) -> tuple[str, ...]:
        """What stays in 16 bits, as the start-up line names it."""
        return (*self.layers.kept, *(("draft",) if self.draft else ()))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        slots, length, block = self.slots, self.max_len, self.format.N
        plain = 4 * slots.heads * slots.head_size
        whole, page = -(-length // block), block * slots.slot_bytes
        packed = whole + slots.sidecar_blocks + slots.sink_blocks
        kinds = [Kind(self.layers.packed, packed, slots.page_bytes, length * plain)]
        if skipped := len(self.layers.skipped):
            kinds.append(Kind(skipped, whole, page, length * plain))
        if windows := len(self.layers.windows):
            # as vLLM counts a window: one block more, because it may begin in the middle of one
            seen = min(self.window_tokens, length)
            kinds.append(Kind(windows, -(-seen // block) + 1, page, seen * plain, apart=True))
        if states := self.states:
            own = states.blocks * states.nbytes
            kinds.append(Kind(states.layers, states.blocks, states.nbytes, own, apart=True))
        if draft := self.draft:
            own = length * 4 * draft.heads * draft.head_size
            kinds.append(Kind(draft.layers, whole, block * draft.token_bytes, own))
        return tuple(kinds)


def _recomputed(vllm_config: Any, fmt: PageFormat, layers: Layers, states: States | None) -> int:
    """The user's number; else W, so that the window is exact after a hit, too.

    Beside layers with a sliding window or a state 0: vLLM keeps of these what the end of a prompt sees, where a hit
    that ends earlier would find nothing.
    """
    chosen = settings_of(vllm_config).recompute
    if chosen is not None:
        return chosen
    return 0 if layers.windows or states else fmt.W


def _block(vllm_config: Any, copies: int, states: States | None) -> int:
    """Tokens of a page. A block of the pool has `copies` pages, one for each head of each packed layer, or a state."""
    cache, option = vllm_config.cache_config, settings_of(vllm_config).N
    if option is not None or cache.user_specified_block_size:
        return option or int(cache.block_size)
    from vllm.platforms import current_platform

    # vLLM's own default on the CPU (0.32 sets it, 0.33 leaves it open), ours elsewhere
    block = CPU_BLOCK if current_platform.is_cpu() else DEFAULT_N
    model = vllm_config.model_config
    # smaller pages beside a state would waste most of each block
    while states is not None and block < LARGEST_BLOCK:
        page = bind(vllm_config, Geometry(model.get_head_size(), block, model.dtype)).record_bytes
        if copies * page >= states.nbytes:
            break
        block *= 2
    return block


def apply(served: Served, vllm_config: Any) -> None:
    """Write into vLLM's configuration what it has to know, and nothing else does. Ledger: ledger.py."""
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

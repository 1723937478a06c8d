"""Makes the one `Served` of a configuration, and remembers it.

`platform.py` asks for it in the process that the user sees and has `apply` write into vLLM's configuration what vLLM
has to know. Workers receive that configuration and make the same object from it while they load the model: it follows
from the configuration and the environment, and nothing that `apply` writes changes it. Once vLLM has allocated its
caches it could not be made any more, because `block_size` is then that of the smallest group, a draft's for example;
what is remembered stays right.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_kvq.formats import Geometry
from vllm_kvq.formats.by_layer import written
from vllm_kvq.formats.codec import LARGEST_BLOCK
from vllm_kvq.formats.table import DEFAULT_N
from vllm_kvq.integration.plan.calibration import Source, fitting_problem
from vllm_kvq.integration.plan.connectors import choose_connector, mark_connector
from vllm_kvq.integration.plan.drafts import Draft
from vllm_kvq.integration.plan.fingerprint import fingerprint
from vllm_kvq.integration.plan.model.heads import Heads
from vllm_kvq.integration.plan.model.layers import Layers, chunk_problem
from vllm_kvq.integration.plan.model.states import States
from vllm_kvq.integration.plan.options import Options
from vllm_kvq.integration.plan.served import Part, Served
from vllm_kvq.kernels.paths import Path, Wish, path_for
from vllm_kvq.kernels.slots import SlotGeometry

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

CPU_BLOCK = 128
LEAST_WINDOW_BLOCK = 16
"""The fewest tokens of a page that vLLM's attention kernels read; those for CPUs need twice as many."""
HARDLY_MORE = 1.05
"""In layers with a window, pages of more tokens may take this many times the least memory that any take."""

_counting: ContextVar[bool] = ContextVar("counting", default=False)
_made: dict[int, tuple[object, Served]] = {}
"""By the configuration's identity: what else it was made from, and the plan."""


@contextmanager
def counting() -> Iterator[None]:
    """Formats that can only be measured are counted as if a server could start with them."""
    before = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(before)


def plan(vllm_config: VllmConfig, options: Options | None = None, layers: Layers | None = None) -> Served:
    """What is served with this configuration: made once in each process. `options`, `layers`: where the caller has them
    already. ValueError, with a sentence, where the parts of the configuration do not fit together."""
    basis = _basis(vllm_config)
    known = _made.get(id(vllm_config))
    if known is not None and known[0] == basis:
        return known[1]
    options = options or Options.of(vllm_config)
    served = _plan(vllm_config, options, layers or Layers.of(vllm_config, options))
    if known is None:
        weakref.finalize(vllm_config, _made.pop, id(vllm_config), None)
    _made[id(vllm_config)] = basis, served
    return served


def _basis(vllm_config: VllmConfig) -> object:
    """What may differ from one call to the next, and decides the plan."""
    from vllm.platforms import current_platform

    chosen = {name: value for name, value in os.environ.items() if name.startswith("VLLM_KVQ_")}
    asked = vllm_config.cache_config.cache_dtype, repr(vllm_config.additional_config)
    return chosen, asked, type(current_platform), vllm_config.device_config.device_type, _counting.get()


def _plan(vllm_config: VllmConfig, options: Options, layers: Layers) -> Served:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft, states = Draft.of(vllm_config), States.of(vllm_config)
    layers.check()
    for schedule in options.schedules:
        schedule.check(layers.packed_layers, layers.total)
    parts = _parts(vllm_config, options, layers, _block(vllm_config, options, layers, states))
    window_blocks = _window_blocks(model.attention_chunk_size, parts[0].format.N)
    if problem := chunk_problem(model.attention_chunk_size, window_blocks, parts[0].format.N):
        raise ValueError(str(problem))
    for part in parts if not _counting.get() else ():
        if sentence := part.format.reference_only:
            raise ValueError(sentence)
    window = model.get_sliding_window() or model.attention_chunk_size or model.max_model_len
    recomputed = _recomputed(options, parts[0].format.W, layers, states)
    calibration = Source.of(vllm_config, options, sorted(layers.packed_layers))
    if calibration is not None and not _counting.get() and (problem := fitting_problem(vllm_config, calibration)):
        raise ValueError(str(problem))
    served = Served(
        options,
        parts,
        layers,
        tuple(Heads.of(vllm_config, layer) for layer in sorted(layers.skipped)),
        tuple(Heads.of(vllm_config, layer) for layer in sorted(layers.windows)),
        draft,
        states,
        recomputed=recomputed,
        max_len=model.max_model_len,
        window_tokens=window - 1 + vllm_config.max_in_flight_tokens,
        decode_tokens=window - 1 + vllm_config.max_concurrent_batches * (1 + vllm_config.num_speculative_tokens),
        window_block=parts[0].format.N,
        ranks=parallel.tensor_parallel_size,
        path=_path(parts, Wish.of(vllm_config.device_config.device_type, os.environ), _capped(model)),
        calibration=calibration,
        fingerprint=_fingerprint(vllm_config, parts, layers, recomputed, calibration),
    )
    if served.sizes > 1 and parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "options given by layer make pages of several sizes, which do not work with pipeline parallelism; "
            "use --tensor-parallel-size"
        )
    return replace(served, window_block=_window_block(served, window_blocks)) if layers.windows else served


def _fingerprint(
    vllm_config: VllmConfig, parts: Sequence[Part], layers: Layers, recomputed: int, calibration: Source | None
) -> str:
    constants = None if calibration is None else calibration.meaning
    return fingerprint(vllm_config, [(part.layers, part.format) for part in parts], layers, recomputed, constants)


def with_calibration(vllm_config: VllmConfig, served: Served, digest: str) -> Served:
    """The same, once its constants are known: as the next start with these would make it."""
    if served.calibration is None:
        return served
    found = replace(served.calibration, found=digest)
    new = _fingerprint(vllm_config, served.parts, served.layers, served.recomputed, found)
    return replace(served, calibration=found, fingerprint=new)


def _parts(vllm_config: VllmConfig, options: Options, layers: Layers, block: int) -> tuple[Part, ...]:
    """The packed layers by their options, in pages of `block` tokens; one part without layers where none is packed."""
    # refusals.py: all packed layers have such heads
    heads = Heads.of(vllm_config, next(iter(layers.packed_layers), 0))
    geometry = Geometry(heads.size, block, vllm_config.model_config.dtype)
    alike: dict[str, list[int]] = {}
    for layer in layers.packed_layers:
        alike.setdefault(options.written(layer), []).append(layer)
    parts = []
    for members in alike.values() or [[]]:
        fmt = options.bind(replace(geometry, layer=members[0] if options.schedules else 0))
        slots = SlotGeometry.of(fmt, heads.count, vllm_config.num_speculative_tokens)
        parts.append(Part(tuple(members), fmt, slots))
    return tuple(parts)


def _capped(model: ModelConfig) -> bool:
    """Whether attention scores have a soft cap."""
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def _path(parts: Sequence[Part], wish: Wish, capped: bool) -> Path:
    """One path for all layers: the slowest that any of them needs, and why."""
    if len(parts) == 1:
        return path_for(parts[0].format, wish, capped)
    found = {written(part.layers): path_for(part.format, wish, capped) for part in parts}
    slowest = max(found.values(), key=lambda path: path.rank)
    why = [f"for {layers} {path.why}" for layers, path in found.items() if path.why and path.rank == slowest.rank]
    slow = [f"in {layers} {path.slow}" for layers, path in found.items() if path.slow and path.rank == slowest.rank]
    return Path(slowest.name, "; ".join(why) or None, "; ".join(slow) or None)


def _recomputed(options: Options, window: int, layers: Layers, states: States | None) -> int:
    """The user's number; otherwise W, so that the window is exact after a hit, too.

    0 next to layers with a sliding window or a state: vLLM keeps what the end of a prompt sees of these, and a hit
    that ends earlier would find nothing.
    """
    chosen = options.settings.recompute
    if chosen is not None:
        return chosen
    return 0 if layers.windows or states else window


def _block(vllm_config: VllmConfig, options: Options, layers: Layers, states: States | None) -> int:
    """Tokens of a page. A block of the pool has a page of each packed layer, or a state."""
    cache, option = vllm_config.cache_config, options.settings.N
    if option is not None or cache.user_specified_block_size:
        return option or int(cache.block_size)
    from vllm.platforms import current_platform

    # vLLM's own default on the CPU (0.32 sets it, 0.33 leaves it open), ours elsewhere
    block = CPU_BLOCK if current_platform.is_cpu() else DEFAULT_N
    # smaller pages next to a state would waste most of each block
    while states is not None and block < LARGEST_BLOCK:
        parts = _parts(vllm_config, options, layers, block)
        if sum(len(part.layers) * part.slots.page_bytes for part in parts) >= states.nbytes:
            break
        block *= 2
    return block


def _window_blocks(chunk: int | None, block: int) -> list[int]:
    """The numbers of tokens that a page of a layer with a window may have, next to packed pages of `block` tokens."""
    from vllm.platforms import current_platform

    least = LEAST_WINDOW_BLOCK * (2 if current_platform.is_cpu() else 1)
    return [tokens for tokens in range(least, block + 1, least) if block % tokens == 0 and not (chunk or 0) % tokens]


def _window_block(served: Served, sizes: Sequence[int]) -> int:
    """The most tokens with which a request takes almost no more memory than with any other number.

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
    mark_connector(vllm_config, served.fingerprint)

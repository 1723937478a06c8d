"""What a request takes of the pool of a server with vLLM's own cache: the same model with `--kv-cache-dtype auto` or
`fp8`. vLLM's own functions put its layers into KV cache groups and count a request's blocks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvq.integration.plan.model.heads import Heads
from vllm_kvq.integration.plan.model.states import HYBRIDS, MAMBA_2
from vllm_kvq.integration.plan.plan import CPU_BLOCK
from vllm_kvq.integration.plan.served import Served

if TYPE_CHECKING:
    from vllm.config import VllmConfig

USUAL_BLOCK = 16
"""Tokens of a block with which vLLM starts on a GPU."""
PLENTY = 1 << 60
"""Bytes of a pool in which there are blocks to count."""
DTYPES = {16: torch.bfloat16, 8: torch.uint8}
"""By the bits of a number in the cache."""


@dataclass(frozen=True)
class Blocks:
    """What requests of one length take of a pool."""

    nbytes: int
    """Of a block."""
    most: int
    """The blocks of a request while its prompt is computed, which vLLM counts for every request."""
    freed: int
    """Those of them that it takes only then: of windows and states."""


def usual_block() -> int:
    """Tokens of a block with which vLLM starts here if no size is given."""
    from vllm.platforms import current_platform

    return CPU_BLOCK if current_platform.is_cpu() else USUAL_BLOCK


def plain_blocks(served: Served, vllm_config: VllmConfig, bits: int, block: int) -> Blocks:
    """`served` and `vllm_config` are those of any of our formats; `block`: tokens of a block."""
    from vllm.utils.math_utils import cdiv
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    config, dtype = copy.copy(vllm_config), DTYPES[bits]
    config.cache_config = cache = copy.copy(vllm_config.cache_config)
    cache.block_size = block = _whole_states(served, config, dtype, block)
    cache.cache_dtype, cache.kv_cache_dtype_skip_layers = "auto", []
    # all of vLLM's own backends can read pages that lie layer by layer
    cache.num_gpu_blocks_override, cache.kv_cache_layout = None, "LBHNC"
    planning: Any = importlib.import_module(_planner())
    groups = planning.get_kv_cache_groups(config, dict(_specs(served, config, dtype, block)))
    pool = planning.get_kv_cache_config_from_groups(config, groups, PLENTY)
    most = round(pool.num_blocks / get_max_concurrency_for_kv_cache_config(config, pool))
    specs = [group.kv_cache_spec for group in groups]
    held = [cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes) for spec in specs]
    kept = [_kept(spec, config, blocks) for spec, blocks in zip(specs, held, strict=True)]
    return Blocks(pool.kv_cache_tensors[0].size // pool.num_blocks, most, sum(held) - sum(kept))


def _planner() -> str:
    """The module of vLLM's that makes KV cache groups."""
    later = "vllm.v1.core.kv_cache_planning"
    return "vllm.v1.core.kv_cache_utils" if find_spec(later) is None else later


def _kept(spec: Any, config: VllmConfig, held: int) -> int:
    """Blocks of a request of one group once its prompt is computed, of the `held` ones that vLLM counts."""
    from vllm.v1.kv_cache_interface import MambaSpec

    if isinstance(spec, MambaSpec):
        return 1 + spec.num_speculative_blocks
    if not hasattr(spec, "max_admission_blocks_per_request"):
        return held
    in_flight = config.max_concurrent_batches * (1 + config.num_speculative_tokens)
    return spec.max_admission_blocks_per_request(in_flight, config.model_config.max_model_len)


def _token(config: VllmConfig, dtype: torch.dtype) -> int:
    """Bytes of a token in a layer with attention."""
    model = config.model_config
    return 2 * model.get_num_kv_heads(config.parallel_config) * model.get_head_size() * dtype.itemsize


def _whole_states(served: Served, config: VllmConfig, dtype: torch.dtype, block: int) -> int:
    """Tokens of a block: in a hybrid vLLM takes a multiple, so that a page is at least as large as a state."""
    return block if served.states is None else block * -(-served.states.nbytes // (block * _token(config, dtype)))


def _specs(served: Served, config: VllmConfig, dtype: torch.dtype, block: int) -> Iterator[tuple[str, Any]]:
    """What the layers of a loaded model say of their caches: those that we would pack or keep, with vLLM's own names
    for them."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    model, layers, cache = config.model_config, served.layers, config.cache_config

    def fields(count: int, size: int) -> dict[str, Any]:
        return {"block_size": block, "num_kv_heads": count, "head_size": size, "dtype": dtype}

    for layer in sorted(layers.attention - layers.sharing):
        heads = Heads.of(config, layer)
        own, name = fields(heads.count, heads.size), f"layers.{layer}.attention"
        if layer not in layers.windows:
            yield name, FullAttentionSpec(**own)
        elif model.attention_chunk_size:
            yield name, ChunkedLocalAttentionSpec(**own, attention_chunk_size=model.attention_chunk_size)
        else:
            yield name, SlidingWindowSpec(**own, sliding_window=model.get_sliding_window())
    for layer in range(served.draft.layers if served.draft else 0):
        assert served.draft is not None
        yield f"draft.{layer}.attention", FullAttentionSpec(**fields(served.draft.heads, served.draft.head_size))
    for layer in range(served.states.layers if served.states else 0):
        assert served.states is not None
        yield (
            f"layers.{layer}.state",
            MambaSpec(
                block_size=cache.mamba_block_size or block,
                # only their bytes count
                shapes=((served.states.nbytes,),),
                dtypes=(torch.uint8,),
                page_size_padded=block * _token(config, dtype),
                mamba_cache_mode=cache.mamba_cache_mode,
                num_speculative_blocks=0 if cache.use_replayssm else config.num_speculative_tokens,
                num_prefill_checkpoint_blocks=int(HYBRIDS.get(model.hf_text_config.model_type) == MAMBA_2),
            ),
        )

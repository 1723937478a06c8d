"""What a cache of given bytes holds, and what a number of requests takes: from a model's configuration, for
`vllm-kvq plan`. The same counts as the start-up line's (`worker/report.py`), so they agree with vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.plan.memory import OVERHEAD, gib
from vllm_kvq.integration.plan.model.weights import checkpoint_bytes
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.preview.plain import Blocks, plain_blocks, usual_block
from vllm_kvq.integration.worker.report import requests

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NULL_BLOCK = 1
"""A block of every pool is vLLM's own and never handed out."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for: requests of `context` tokens, and what there is for them."""

    context: int
    concurrency: int | None = None
    cache_bytes: int | None = None
    """For one rank."""
    stages: int = 1
    """Ranks that share the layers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Row:
    """One kind of cache. Bytes are those of one rank."""

    name: str
    bits: float
    """Bits per number over a whole request, everything counted."""
    request_bytes: int
    token_bytes: float
    """Bytes per token of such a request: windows, states, sidecars and sinks are shared out over all of them."""
    tokens: int | None
    """Tokens that fit into the cache, in requests of this length."""
    vllm_tokens: int | None
    """What vLLM's own line "KV cache size" will say; None where vLLM would not start, because no such request fits."""
    needed: int | None
    """Bytes for the concurrent requests that are wanted."""


def packed(served: Served, wanted: Wanted) -> Row:
    """A format of ours; `served` is planned for requests of the same length."""
    pool = served.pool
    return _row(served.label, Blocks(pool.block_bytes, pool.per_request, pool.freed), served, wanted)


def plain(served: Served, vllm_config: VllmConfig, wanted: Wanted, bits: int, block: int | None = None) -> Row:
    """vLLM's own cache with this model, in 16 bits or in fp8's 8, in blocks of `block` tokens."""
    blocks = plain_blocks(served, vllm_config, bits, block or usual_block())
    return _row("bf16" if bits == 16 else "fp8", blocks, served, wanted)


def times_plain(served: Served, context: int) -> float:
    """How many times as many requests of `context` tokens fit as with 16 bits, the latter counted without blocks."""
    served = replace(served, max_len=context)
    return _in_16_bits(served) / (served.pool.per_request * served.pool.block_bytes)


def _in_16_bits(served: Served) -> int:
    """Bytes of a request, without blocks. The states of a hybrid stay as they are."""
    return sum(kind.layers * kind.plain_bytes for kind in served.kinds)


def _row(name: str, blocks: Blocks, served: Served, wanted: Wanted) -> Row:
    first, others = blocks.most * blocks.nbytes, (blocks.most - blocks.freed) * blocks.nbytes
    several = wanted.concurrency and NULL_BLOCK * blocks.nbytes + first + (wanted.concurrency - 1) * others
    tokens, vllm_tokens = _tokens(blocks, wanted)
    return Row(
        name,
        bits=16 * first / _in_16_bits(served),
        request_bytes=(request := -(-first // wanted.stages)),
        token_bytes=request / wanted.context,
        tokens=tokens,
        vllm_tokens=vllm_tokens,
        needed=several and -(-several // wanted.stages),
    )


def _tokens(blocks: Blocks, wanted: Wanted) -> tuple[int | None, int | None]:
    """Those that fit, and those of vLLM's own line, which counts for every request what only one at a time takes.

    Where no whole request fits, vLLM does not start: what fits is then the part of one for which there are blocks."""
    if wanted.cache_bytes is None:
        return None, None
    pool = wanted.cache_bytes * wanted.stages // blocks.nbytes
    if pool - NULL_BLOCK < blocks.most:
        return int(max(0, pool - NULL_BLOCK) / blocks.most * wanted.context), None
    fit = requests(pool, blocks.most, blocks.freed)
    return int(fit * wanted.context), int(pool / blocks.most * wanted.context)


# -- memory -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weights:
    nbytes: int
    """The whole model's."""
    counted: bool
    """Whether its parameters were counted from the configuration, because no files are here."""


def weights(vllm_config: VllmConfig) -> Weights | None:
    """None where neither files nor the configuration tell: a quantized checkpoint that is not here, or a model that
    Transformers does not know."""
    model = vllm_config.model_config
    if found := checkpoint_bytes(model):
        return Weights(found, False)
    if getattr(model.hf_config, "quantization_config", None) is not None:
        return None
    counted = _parameters(model.hf_config)
    return None if counted is None else Weights(counted * model.dtype.itemsize, True)


def _parameters(hf_config: Any) -> int | None:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(hf_config)
    except Exception:  # whatever a model's own code raises: it is then not known
        return None
    return sum(parameter.numel() for parameter in built.parameters())


def cache_of(gpu_bytes: int, config: VllmConfig, model: Weights) -> tuple[int, str]:
    """Roughly the bytes that vLLM gives its cache on a GPU with this much memory, and how they were calculated."""
    share, ranks = config.cache_config.gpu_memory_utilization, config.parallel_config.world_size
    left = int(gpu_bytes * share) - model.nbytes // ranks - OVERHEAD
    how = "counted from the configuration" if model.counted else "in the checkpoint"
    return left, (
        f"{share:.0%} of {gib(gpu_bytes)}, less {gib(model.nbytes // ranks)} of weights ({how}) and about "
        f"{gib(OVERHEAD)} for the process"
    )


def too_small(because: str) -> str:
    return f"nothing is left for the cache ({because}); use more GPUs with --tp, or a smaller model"

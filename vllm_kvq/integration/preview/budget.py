"""What a cache of given bytes holds, and what a number of requests takes: from a model's configuration, for
`vllm-kvq plan`. The same counts as the start-up line's (`worker/report.py`), so they agree with vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.plan.memory import OVERHEAD, gib
from vllm_kvq.integration.plan.model.weights import checkpoint_bytes
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.worker.report import Capacity

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
    """Per number over a whole request, everything counted."""
    request_bytes: int
    token_bytes: float
    """Of each token of such a request: windows, states, sidecars and sinks are shared out over all of them."""
    tokens: int | None
    """That fit into the cache, in requests of this length."""
    needed: int | None
    """Bytes for the requests that are wanted at a time."""


@dataclass(frozen=True)
class Need:
    """Bytes, of all stages together."""

    first: int
    """A request, while its prompt is computed."""
    others: int
    """Each of the others: windows and states take less once a prompt is computed."""


def packed(served: Served, wanted: Wanted) -> Row:
    """A format of ours; `served` is planned for requests of the same length."""
    pool, size = served.pool, served.pool.block_bytes
    need = Need(pool.per_request * size, (pool.per_request - pool.freed) * size)
    tokens = None
    if wanted.cache_bytes is not None:
        tokens = max(0, Capacity.of(served, wanted.cache_bytes * wanted.stages // size).tokens)
    return _row(served.label, need, plain_need(served, 16), tokens, wanted, NULL_BLOCK * size)


def times_plain(served: Served, context: int) -> float:
    """How many times as many requests of `context` tokens fit as with 16 bits."""
    served = replace(served, max_len=context)
    need = served.pool.per_request * served.pool.block_bytes
    return plain_need(served, 16).first / need


def plain(served: Served, wanted: Wanted, bits: int) -> Row:
    """vLLM's own cache with this model, in 16 bits or in fp8's 8, counted without blocks."""
    need, tokens = plain_need(served, bits), None
    if wanted.cache_bytes is not None:
        room = wanted.cache_bytes * wanted.stages
        requests = 1 + (room - need.first) / need.others if room > need.first else room / need.first
        tokens = int(requests * wanted.context)
    return _row("bf16" if bits == 16 else "fp8", need, plain_need(served, 16), tokens, wanted, 0)


def plain_need(served: Served, bits: int) -> Need:
    """The states of a hybrid stay as they are."""
    first = sum(kind.layers * kind.plain_bytes for kind in served.kinds)
    freed = sum(kind.layers * kind.plain_freed for kind in served.kinds)
    states = served.states
    fixed = states.layers * states.nbytes if states else 0
    blocks, freed_blocks = (states.blocks, states.blocks - states.kept) if states else (0, 0)
    first = (first - fixed * blocks) * bits // 16 + fixed * blocks
    return Need(first, first - (freed - fixed * freed_blocks) * bits // 16 - fixed * freed_blocks)


def _row(name: str, need: Need, in_16_bits: Need, tokens: int | None, wanted: Wanted, unused: int) -> Row:
    """`unused`: bytes of the pool that no request gets."""
    several = wanted.concurrency and unused + need.first + (wanted.concurrency - 1) * need.others
    return Row(
        name,
        bits=16 * need.first / in_16_bits.first,
        request_bytes=(request := -(-need.first // wanted.stages)),
        token_bytes=request / wanted.context,
        tokens=tokens,
        needed=several and -(-several // wanted.stages),
    )


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

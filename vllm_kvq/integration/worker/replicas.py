"""Tensor parallelism with more ranks than KV heads: vLLM gives several ranks a copy of the same KV head.

Each of them has different query heads, and SQuat's subspace is that of all queries that share a KV head. So the copies
show each other their queries before a state is fitted; then their states, and their pages, are equal, and they are
those of one process. (What depends only on keys or on a seed is equal anyway.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AllQueries = Callable[[torch.Tensor], torch.Tensor]


def all_queries_of(vllm_config: VllmConfig, layer: int) -> AllQueries | None:
    """What extends a rank's queries by those of the copies; None where every KV head of the layer lies on one rank."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    copies = max(1, ranks // vllm_config.model_config.model_arch_config[layer].total_num_kv_heads)
    return None if copies == 1 else _gatherer(copies)


@functools.cache
def _gatherer(copies: int) -> AllQueries:
    """The same function for all layers: they share a step if they have equal arguments."""
    return functools.partial(queries_of_all_copies, copies=copies)


def queries_of_all_copies(query: torch.Tensor, copies: int) -> torch.Tensor:
    """(tokens, heads, d) of this rank -> (tokens, copies * heads, d), in the order of one process."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    every = group.all_gather(query.contiguous(), dim=1).unflatten(1, (group.world_size, -1))
    # neighbouring ranks share a head
    first = group.rank_in_group // copies * copies
    return every[:, first : first + copies].flatten(1, 2)

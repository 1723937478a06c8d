"""The memory that vLLM would give its KV cache here, estimated before weights are loaded.

On a CPU vLLM takes most of the machine's memory for the cache unless it is told how much, and exits if that is in use.
It notices in a child process, deep in its start; here the same question is asked before.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvq.integration.plan.model.weights import checkpoint_bytes
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

GIB = 1 << 30
SPACE = "VLLM_CPU_KVCACHE_SPACE"
OVERHEAD = GIB
"""What a worker's process takes in addition to weights and cache: Python, torch, and vLLM's buffers. Roughly."""


def space_problem(environment: Mapping[str, str]) -> Problem | None:
    """vLLM reads a whole number of GiB, and exits with a traceback on anything else."""
    given = environment.get(SPACE)
    if not given or given.isdigit():
        return None
    return Problem(f"{SPACE} is {given!r}", f"it takes whole GiB, as in {SPACE}=4")


def space_here_problem() -> Problem | None:
    """The same where it is read: on a CPU."""
    from vllm.platforms import current_platform

    return space_problem(os.environ) if current_platform.is_cpu() else None


@dataclass(frozen=True)
class Machine:
    """The memory of the node that vLLM's CPU worker would take."""

    total: int
    available: int

    @classmethod
    def here(cls) -> Machine:
        from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info, get_visible_memory_node

        nodes, node = get_visible_memory_node(), get_allowed_cpu_list()[0].numa_node
        memory = get_memory_node_info(node if node in nodes else nodes[0])
        return cls(memory.total_memory, memory.available_memory)

    def problem(self, explicit: int | None, share: float, weights: int = 0) -> Problem | None:
        """Why vLLM would exit at its start, or the system kill it: `explicit` bytes for the caches, or that `share` of
        all memory, and the bytes of the weights."""
        wanted = math.ceil(self.total * share) if explicit is None else explicit
        free = f"{gib(self.available)} of {gib(self.total)} are free"
        if explicit is not None and wanted + weights > self.available >= wanted:
            return Problem(
                f"{gib(weights)} of weights and {gib(explicit)} of cache do not fit, because {free}",
                "give the cache less with --kv-cache-memory-bytes, or serve a smaller model",
            )
        if wanted <= self.available:
            return None
        if explicit is not None:
            return Problem(f"the cache is set to {gib(explicit)}, but {free}", self.advice())
        return Problem(
            f"vLLM would take {share:.0%} of this machine's memory ({gib(wanted)}), but {free}", self.advice()
        )

    def advice(self) -> str:
        return f"set a limit, for example {' '.join(self.limit)}"

    @property
    def limit(self) -> tuple[str, str]:
        """A flag of `vllm serve`, and how much of what is free it may give the cache."""
        return "--kv-cache-memory-bytes", f"{max(1, self.available // 2 // GIB)}G"


def memory_problem(vllm_config: VllmConfig) -> Problem | None:
    """Why vLLM's CPU workers would not get the memory that they ask for."""
    from vllm.platforms import current_platform

    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    # Workers make copies of the configuration, too, when the cache is there and the memory is gone.
    if not current_platform.is_cpu() or multiprocessing.parent_process():
        return None
    weights, ranks = loaded_bytes(vllm_config.model_config), parallel.world_size
    if parallel.distributed_executor_backend == "ray":  # other ranks may be on other machines
        weights, ranks = weights // ranks, 1
    explicit = cache.kv_cache_memory_bytes
    return _problem(None if explicit is None else ranks * explicit, cache.gpu_memory_utilization, weights)


@functools.cache
def _problem(explicit: int | None, share: float, weights: int) -> Problem | None:
    """Asked once: later, memory that our own cache takes may be missing."""
    return Machine.here().problem(explicit, share, weights)


def loaded_bytes(model: ModelConfig) -> int:
    """What a checkpoint takes in memory, as far as its files are on this machine: float32 becomes the model's dtype."""
    stored = getattr(model.hf_config, "dtype", None)
    return checkpoint_bytes(model) * (model.dtype.itemsize if stored == torch.float32 else 4) // 4


@dataclass(frozen=True)
class CacheMemory:
    nbytes: int
    """On one rank, roughly."""
    because: str
    problem: Problem | None = None


def cache_memory(vllm_config: VllmConfig) -> CacheMemory:
    from vllm.platforms import current_platform

    explicit, share = vllm_config.cache_config.kv_cache_memory_bytes, vllm_config.cache_config.gpu_memory_utilization
    weights = loaded_bytes(vllm_config.model_config) // vllm_config.parallel_config.world_size
    if current_platform.is_cpu():
        total = Machine.here().total  # memory_problem has asked whether it is free
    else:
        total = current_platform.get_device_total_memory()
    if explicit is not None:
        return CacheMemory(explicit, f"{SPACE} or --kv-cache-memory-bytes")
    left = int(total * share) - weights - OVERHEAD
    because = f"{share:.0%} of {gib(total)}, less {gib(weights)} of weights and about {gib(OVERHEAD)} for the process"
    problem = None
    if left <= 0:
        problem = Problem(f"nothing is left for the cache: {because}", "serve a smaller model, or use a larger machine")
    return CacheMemory(max(left, 0), because, problem)


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"

"""On a CPU vLLM takes most of the machine's memory for the cache unless it is told how much, and ends if that is in use.

It notices in a child process, deep in its start. The same question is asked here before anything is loaded.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
from typing import Any

GIB = 1 << 30


def memory_problem(vllm_config: Any) -> str | None:
    """Why vLLM will not get the memory that it asks for, and what to say instead."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    # Workers make copies of the configuration, too, when the cache is there and the memory is gone.
    if not current_platform.is_cpu() or multiprocessing.parent_process() or cache.kv_cache_memory_bytes is not None:
        return None
    return _problem(cache.gpu_memory_utilization)


@functools.cache
def _problem(share: float) -> str | None:
    """Asked once: later on memory may be missing that our own cache takes."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info, get_visible_memory_node

    nodes, node = get_visible_memory_node(), get_allowed_cpu_list()[0].numa_node
    memory = get_memory_node_info(node if node in nodes else nodes[0])
    return shortage(share, memory.total_memory, memory.available_memory)


def shortage(share: float, total: int, available: int) -> str | None:
    wanted = math.ceil(total * share)
    if wanted <= available:
        return None
    return (
        f"vLLM would take {wanted / GIB:.1f} GiB for the cache on this CPU and {available / GIB:.1f} GiB are free; "
        f"say how much it may take: --kv-cache-memory-bytes {max(1, available // 2 // GIB)}G"
    )

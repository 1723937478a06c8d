"""KV connectors, which keep blocks elsewhere: which one goes with packed pages, and what it needs of us.

vLLM's SimpleCPUOffloadConnector copies whole blocks, whatever is in them, and finds them again with the managers of
our own specs. It stores what prefix caching shares: packed pages, sinks, the pages of layers in 16 bits and states;
never sidecars.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger

from vllm_kvq.integration.manager import SinkManager

logger = init_logger("vllm.kvq")

KNOWN = "SimpleCPUOffloadConnector"


def connector_problem(vllm_config: Any) -> str | None:
    """What to do instead, where a connector does not go with a packed cache."""
    from vllm.platforms import current_platform

    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    without = "drop --kv-transfer-config and --kv-offloading-size"
    if cache.kv_offloading_size:
        known = cache.kv_offloading_backend == "native"
    elif transfer is None:
        return None
    else:
        known = transfer.kv_connector == KNOWN and transfer.kv_connector_module_path is None
    if not known:
        return f"{without}, or use {KNOWN} on a GPU"
    return None if can_copy(current_platform) else f"{without}: {KNOWN} copies on GPUs alone"


def choose_connector(vllm_config: Any) -> None:
    """Have the known connector serve --kv-offloading-size. vLLM's own choice for it, OffloadingConnector, ends where it
    meets other kinds of layers than vLLM's, as sinks and sidecars are."""
    from vllm.config import KVTransferConfig

    cache = vllm_config.cache_config
    if not cache.kv_offloading_size:
        return
    transfer = vllm_config.kv_transfer_config or KVTransferConfig()
    transfer.kv_connector, transfer.kv_role = KNOWN, "kv_both"
    transfer.kv_connector_extra_config["cpu_bytes_to_use"] = cache.kv_offloading_size * (1 << 30)
    vllm_config.kv_transfer_config, cache.kv_offloading_size = transfer, None
    logger.info("kvq: --kv-offloading-size is served by %s", KNOWN)


def can_copy(platform: Any) -> bool:
    """Whether vLLM's copier runs there."""
    return bool(platform.is_cuda())


def look_behind_hits() -> None:
    """Have the connector find the rest of a prefix whose beginning is on the GPU, once, with sinks, too.

    It asks for what follows a hit as if that were a prefix of its own. There the first block has no sinks: they came
    with the hit.
    """
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Scheduler

    ask = Scheduler.get_num_new_matched_tokens
    if getattr(ask, "_kvq", False):
        return

    @functools.wraps(ask)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        SinkManager.behind_hit = num_computed_tokens > 0
        try:
            return ask(self, request, num_computed_tokens)
        finally:
            SinkManager.behind_hit = False

    get_num_new_matched_tokens._kvq = True  # type: ignore[attr-defined]
    Scheduler.get_num_new_matched_tokens = get_num_new_matched_tokens

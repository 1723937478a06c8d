"""KV connectors, which keep blocks elsewhere: which one goes with packed pages, and what it needs of us.

vLLM's SimpleCPUOffloadConnector copies whole blocks, whatever is in them, and finds them again with the managers of
our own specs. It stores what prefix caching shares: packed pages, sinks, the pages of layers in 16 bits and states;
never sidecars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvq.integration.plan.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvq")

KNOWN = "SimpleCPUOffloadConnector"


def connector_problem(vllm_config: VllmConfig) -> Problem | None:
    """A connector that does not go with a packed cache."""
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
        return Problem("KV connectors", f"{without}, or use {KNOWN} on a GPU")
    return None if can_copy(current_platform) else Problem("KV connectors", f"{without}: {KNOWN} copies only on GPUs")


def choose_connector(vllm_config: VllmConfig) -> None:
    """Have the known connector serve --kv-offloading-size. vLLM's own choice for it, OffloadingConnector, crashes where
    it meets other kinds of layers than vLLM's, as sinks and sidecars are."""
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

"""KV connectors, which keep blocks elsewhere: which one goes with packed pages, and what it needs of us.

vLLM's SimpleCPUOffloadConnector copies whole blocks, whatever is in them, and finds them again with the managers of
our own specs. It stores what prefix caching shares: packed pages, sinks, the pages of layers in 16 bits and states;
never sidecars.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kvq.integration.manager import SinkManager

KNOWN = "SimpleCPUOffloadConnector"


def connector_problem(vllm_config: Any) -> str | None:
    """What to do instead, where a connector does not go with a packed cache."""
    from vllm.platforms import current_platform

    transfer, without = vllm_config.kv_transfer_config, "drop --kv-transfer-config and --kv-offloading-size"
    if transfer is None and not vllm_config.cache_config.kv_offloading_size:
        return None
    if transfer is None or transfer.kv_connector != KNOWN or transfer.kv_connector_module_path is not None:
        return f"{without}, or use {KNOWN} on a GPU"
    return None if can_copy(current_platform) else f"{without}: {KNOWN} copies on GPUs alone"


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

"""What vLLM's V2 model runner warms up with on a GPU: requests that no scheduler has seen, made of blocks 1, 2, 3, ...

It gives each circular buffer one block, and takes the same blocks again for the next requests. A companion has more of
them, and its blocks hold zeros when a request begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_kvq.integration.sidecar import Companion
from vllm_kvq.integration.spec import CompanionSpec


def serve_warmup() -> None:
    """Let these requests have what others have."""
    from vllm.v1.worker.gpu import warmup

    counter = warmup._warmup_block_counter
    if getattr(counter, "_kvq", False):
        return

    @functools.wraps(counter)
    def _warmup_block_counter(model_runner: Any) -> Callable[[int, Any], int]:
        """Called once before each set of requests: nobody else's are there yet."""
        for layer in model_runner.vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, Companion):
                layer.blocks.zero_()
        count = counter(model_runner)

        def blocks(num_tokens: int, kvcache_spec: Any) -> int:
            spec = getattr(kvcache_spec, "first_spec", kvcache_spec)
            return spec.blocks_per_request if isinstance(spec, CompanionSpec) else count(num_tokens, kvcache_spec)

        return blocks

    _warmup_block_counter._kvq = True  # type: ignore[attr-defined]
    warmup._warmup_block_counter = _warmup_block_counter

"""What vLLM's V2 model runner warms up with on a GPU: requests that no scheduler has seen, made of blocks 1, 2, 3, ...

It gives each circular buffer one block, and takes the same blocks again for the next requests. A companion has more of
them, and its blocks hold zeros when a request begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import V2_RUNNER, Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTER = "vllm.v1.worker.gpu.warmup:_warmup_block_counter"
COUNT = "blocks_per_request"
"""What only our companions and their specs have (worker/companions.py, core/spec.py)."""


def serve_warmup(_: VllmConfig) -> None:
    def make(counter: Any) -> Any:
        @functools.wraps(counter)
        def _warmup_block_counter(model_runner: Any) -> Callable[[int, Any], int]:
            """Called once before each set of requests, when there are no others yet."""
            for layer in model_runner.vllm_config.compilation_config.static_forward_context.values():
                if hasattr(layer, COUNT):
                    layer.blocks.zero_()
            count = counter(model_runner)

            def blocks(num_tokens: int, kvcache_spec: Any) -> int:
                spec = getattr(kvcache_spec, "first_spec", kvcache_spec)
                return spec.blocks_per_request if hasattr(spec, COUNT) else count(num_tokens, kvcache_spec)

            return blocks

        return _warmup_block_counter

    once(COUNTER, make)


WARMED_UP = Patch(
    what="vllm.v1.worker.gpu.warmup._warmup_block_counter wrapped",
    why="a GPU warms up with fewer blocks than a companion has, and with used ones",
    until="it asks the spec, and hands out zeroed blocks",
    needs=(COUNTER,),
    moment=Moment.BUILT,
    install=serve_warmup,
    replaces=(COUNTER,),
    only=V2_RUNNER,
)

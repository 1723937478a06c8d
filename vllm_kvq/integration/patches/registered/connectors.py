"""The rest of a prefix that a KV connector keeps elsewhere is found when its beginning is on the GPU.

vLLM asks its managers what the connector has of a request after a hit as if that were a prefix of its own. Its first
block then has no sinks: they came with the hit. So our manager of sinks is told that something precedes it.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import CONNECTORS, Hooks, Patch

MATCHED = "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler.get_num_new_matched_tokens"


def look_behind_hits(hooks: Hooks) -> None:
    def make(ask: Any) -> Any:
        @functools.wraps(ask)
        def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
            hooks.behind_hit(num_computed_tokens > 0)
            try:
                return ask(self, request, num_computed_tokens)
            finally:
                hooks.behind_hit(False)

        return get_num_new_matched_tokens

    once(MATCHED, make)


BEHIND_HITS = Patch(
    what="SimpleCPUOffloadScheduler.get_num_new_matched_tokens wrapped",
    why="it asks for what follows a hit as if a request began there, where no sinks are",
    until="managers are told what comes before",
    needs=(MATCHED,),
    install=look_behind_hits,
    replaces=(MATCHED,),
    only=CONNECTORS,
)

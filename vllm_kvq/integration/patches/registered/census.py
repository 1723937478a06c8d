"""Our numbers are taken whenever vLLM's scheduler makes its statistics, which it does after each step.

What is cached is known only in the engine core, and a request's tokens only to its scheduler; vLLM has no place there
for a plugin's numbers.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Hooks, Patch

STATS = "vllm.v1.core.sched.scheduler:Scheduler.make_stats"


def take_census(hooks: Hooks) -> None:
    def make(own: Any) -> Any:
        @functools.wraps(own)
        def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            stats = own(self, *args, **kwargs)
            if stats is not None:  # the user has not switched statistics off
                hooks.after_step(self)
            return stats

        return make_stats

    once(STATS, make)


CENSUS = Patch(
    what="Scheduler.make_stats wrapped",
    why="what is cached is known only in the engine core, and a request's tokens only to its scheduler",
    until="a plugin may add to its statistics",
    needs=(STATS,),
    install=take_census,
    replaces=(STATS,),
)

"""What vLLM asks its platform: which backend serves a layer, and whether a configuration is sound.

A KV cache dtype names no backend in vLLM, and the CPU platform ignores a backend that is asked for by name. And a
plugin may not look at a configuration, so a model or an option that our formats don't serve would only be noticed once
the weights are loaded, in another process than the user's.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Hooks, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKEND = "vllm.platforms:current_platform.get_attn_backend_cls"
CONFIG = "vllm.platforms:current_platform.check_and_update_config"


def choose_backends(hooks: Hooks) -> None:
    def make(choose: Any) -> Any:
        @functools.wraps(choose)
        def get_attn_backend_cls(
            c: Any, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, **kwargs: Any
        ) -> str:
            ours = hooks.backend_of(attn_selector_config)
            return ours or choose(c, selected_backend, attn_selector_config, **kwargs)

        return get_attn_backend_cls

    once(BACKEND, make)


def see_configurations(hooks: Hooks) -> None:
    def make(check: Any) -> Any:
        @functools.wraps(check)
        def check_and_update_config(c: Any, vllm_config: VllmConfig) -> None:
            check(c, vllm_config)
            hooks.configure(vllm_config)

        return check_and_update_config

    once(CONFIG, make)


BACKENDS = Patch(
    what="Platform.get_attn_backend_cls wrapped",
    why="a dtype names no backend, and the CPU platform ignores a requested one; "
    "a layer that vLLM gives no dtype is found here, too",
    until="a dtype may name its backend",
    needs=(BACKEND,),
    install=choose_backends,
    replaces=(BACKEND,),
)
CONFIGURATIONS = Patch(
    what="Platform.check_and_update_config wrapped",
    why="a model or option is refused before weights load, in the process that the user sees, "
    "and what follows from the rest of the configuration is written",
    until="plugins may validate configurations",
    needs=(CONFIG,),
    install=see_configurations,
    replaces=(CONFIG,),
)

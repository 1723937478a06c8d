"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process, before it parses anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvq.integration.patches.patch import Hooks


def register() -> None:
    """Make the formats known to vLLM. Safe to call again."""
    from vllm.logger import init_logger

    from vllm_kvq.integration import compat
    from vllm_kvq.integration.patches import names, registry

    if problem := compat.plugin_problem():
        init_logger("vllm.kvq").error("%s", problem)
        return
    if trial := names.trial():
        init_logger("vllm.kvq").error("%s", trial)
    registry.register(hooks())
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_kvq.integration import platform
    from vllm_kvq.integration.core import spec

    register_backend(AttentionBackendEnum.CUSTOM, platform.BACKEND)
    spec.register()


def hooks() -> Hooks:
    """What the patches call."""
    from vllm_kvq.integration import platform
    from vllm_kvq.integration.core import held, manager
    from vllm_kvq.integration.patches.patch import Hooks
    from vllm_kvq.integration.plan import memory

    return Hooks(
        configure=platform.configure,
        backend_of=platform.backend_of,
        serves=platform.ours,
        window_block=platform.window_block,
        after_step=held.take_census,
        behind_hit=manager.SinkManager.look_behind_hit,
        environment_problem=memory.space_here_problem,
    )

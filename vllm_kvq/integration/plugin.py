"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process, before it parses anything."""

from __future__ import annotations


def register() -> None:
    """Make the formats known to vLLM. Safe to call again; the order of the steps matters."""
    from vllm.logger import init_logger

    from vllm_kvq.integration import compat

    if problem := compat.version_problem() or compat.names_problem():
        init_logger("vllm.kvq").error("%s", problem)
        return
    compat.hide_own_sources()
    compat.register_dtypes()
    compat.hide_test_formats()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_kvq.integration import connectors, held, layout, platform, spec, windows

    register_backend(AttentionBackendEnum.CUSTOM, platform.BACKEND)
    compat.wrap_platform(platform.configure, platform.backend_of)
    layout.keep_pages_apart(platform.ours)
    windows.cut_windows(platform.window_block)
    compat.ensure_builtin_specs()
    connectors.look_behind_hits()
    compat.wrap_scheduler(held.take_census)
    spec.register()

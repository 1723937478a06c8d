"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process, before it parses anything."""

from __future__ import annotations

BACKEND = "vllm_kvq.integration.backend.KVQBackend"


def register() -> None:
    """Make the formats known to vLLM. Safe to call again; the order of the steps matters."""
    from vllm.logger import init_logger

    from vllm_kvq.integration import compat

    if problem := compat.version_problem() or compat.names_problem():
        init_logger("vllm.kvq").error("%s", problem)
        return
    compat.hide_own_sources()
    compat.register_dtypes()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    from vllm_kvq.integration import validate

    compat.wrap_platform(BACKEND, validate)
    compat.ensure_builtin_specs()
    from vllm_kvq.integration import spec

    spec.register()

"""What vLLM asks its platform, answered for our formats: may this be served, and which backend serves a layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_kvq.formats import FORMATS
from vllm_kvq.integration import compat, metrics
from vllm_kvq.integration.patches import registry
from vllm_kvq.integration.patches.patch import Moment
from vllm_kvq.integration.plan import budgets, refusals
from vllm_kvq.integration.plan.drafts import is_draft
from vllm_kvq.integration.plan.model.layers import WINDOWS
from vllm_kvq.integration.plan.plan import apply, plan
from vllm_kvq.problem import Refused

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.kvq")

BACKEND = "vllm_kvq.integration.worker.backend.KVQBackend"
# vLLM wants paths; and this one's module imports vLLM's CPU attention, which is not there on other platforms.
KEPT_LAYER = "vllm_kvq.integration.worker.side_by_side.SideBySideBackend"


def configure(vllm_config: VllmConfig) -> None:
    """Refuse this configuration, or make it one that serves our format. vLLM calls it for every copy that it makes."""
    cache = vllm_config.cache_config
    if cache is None:
        return
    try:
        if budget := budgets.budget_of(vllm_config):
            chosen = budgets.choose(vllm_config, budget)
            cache.cache_dtype = chosen.format
            logger.info_once("kvq: %s", str(chosen))
        (refusals.check if ours(vllm_config) else refusals.check_other)(vllm_config)
        check_patches(vllm_config)
    except Refused as error:
        if _is_vllms_command():
            # the bare sentence instead of a traceback
            raise SystemExit(f"vllm-kvq: {error}") from None
        raise
    if ours(vllm_config) and vllm_config.model_config is not None:
        apply(plan(vllm_config), vllm_config)
        metrics.open_folder()
        registry.install(Moment.CONFIGURED, vllm_config)


def check_patches(vllm_config: VllmConfig) -> None:
    """Raise where vLLM lacks a name that this server needs."""
    served = ours(vllm_config) and vllm_config.model_config is not None
    if served and (problem := compat.server_problem(vllm_config)):
        raise Refused(str(problem))


def ours(vllm_config: VllmConfig) -> bool:
    """Whether a format of ours serves it."""
    return vllm_config.cache_config.cache_dtype in FORMATS


def window_block(vllm_config: VllmConfig) -> int | None:
    """Tokens of a page in layers with a window or chunks; None where no format of ours is served."""
    return plan(vllm_config).window_block if ours(vllm_config) else None


def _is_vllms_command() -> bool:
    """Whether this process is `vllm ...` or `python -m vllm...`."""
    spec = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).name == "vllm" or (spec is not None and spec.name.startswith("vllm."))


def backend_of(asked: AttentionSelectorConfig) -> str | None:
    """The backend of a layer, by vLLM's AttentionSelectorConfig; None: the platform's own choice."""
    if asked.kv_cache_dtype in FORMATS:
        refusals.check_selection(asked)
        return BACKEND
    current = get_current_vllm_config_or_none()
    if current is None:
        return None
    if not is_draft(current):
        if not ours(current):
            return None
        check_other_layer(current.cache_config, asked)
    return KEPT_LAYER if current_platform.is_cpu() else None


def check_other_layer(cache: CacheConfig, asked: AttentionSelectorConfig) -> None:
    """A layer to which vLLM gave a dtype other than ours, which it may do only with layers that are not packed."""
    window = WINDOWS in cache.kv_cache_dtype_skip_layers and asked.has_sliding_window
    if not window and not any(layer.isdigit() for layer in cache.kv_cache_dtype_skip_layers):
        raise Refused(
            f"--kv-cache-dtype {cache.cache_dtype} does not reach an attention layer of this model, whose cache "
            "would stay in 16 bits; use --kv-cache-dtype auto"
        )

"""KV connectors, which keep blocks elsewhere: which one works with packed pages, and what it needs from us.

vLLM's SimpleCPUOffloadConnector copies whole blocks, whatever is in them, and finds them again with the managers of
our own specs. It stores what prefix caching shares: packed pages, sinks, the pages of layers in 16 bits and states;
never sidecars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvq.integration.patches.registered import fingerprints
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms import Platform

logger = init_logger("vllm.kvq")

KNOWN = "SimpleCPUOffloadConnector"
SEVERAL = "MultiConnector"
"""Hands everything on to the connectors that it lists, so it is allowed where they are."""

ONE_TABLE = "has one block table per request, where packed layers have several"
HANDS_OVER = "hands requests over while their newest tokens are in sidecars"
LAYER_BY_LAYER = f"takes no packed pages that lie layer by layer, and {HANDS_OVER}"
REFUSED = {
    "DecodeBenchConnector": "fills the cache with numbers that no model has computed",
    "ExampleConnector": f"{ONE_TABLE}, and copies single tokens by their slots, which packed pages do not have",
    "ExampleHiddenStatesConnector": "stores hidden states, and needs speculative decoding with extract_hidden_states",
    "FlexKVConnectorV1": ONE_TABLE,
    "HF3FSKVConnector": ONE_TABLE,
    "HiSparseConnector": "is for models with sparse attention",
    "LMCacheConnectorV1": ONE_TABLE,
    "LMCacheMPConnector": "identifies prompts only by tokens and model name, so it would return pages written with "
    "other options",
    "MoRIIOConnector": f"{HANDS_OVER}; it is for AMD's GPUs and has not been tried",
    "MooncakeConnector": LAYER_BY_LAYER,
    "MooncakeStoreConnector": "stores a block before all its tokens are packed, and wants every cache group to have "
    "the last one of a hit, where sinks have only the first",
    "NixlConnector": LAYER_BY_LAYER,
    "NixlPullConnector": LAYER_BY_LAYER,
    "NixlPushConnector": LAYER_BY_LAYER,
    "OffloadingConnector": "takes only vLLM's own kinds of layers, and sinks are another kind",
}
"""All others of vLLM's, and what stops each."""


def connector_problem(vllm_config: VllmConfig) -> Problem | None:
    """A connector that does not work with a packed cache."""
    from vllm.platforms import current_platform

    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    without = "drop --kv-transfer-config and --kv-offloading-size"
    if cache.kv_offloading_size and cache.kv_offloading_backend != "native":
        what: str | None = f"--kv-offloading-backend {cache.kv_offloading_backend}"
    elif transfer is not None and transfer.kv_connector is not None:
        what = _refused(transfer.kv_connector, transfer.kv_connector_module_path, transfer.kv_connector_extra_config)
    elif cache.kv_offloading_size:
        what = None
    else:
        return None
    if what is not None:
        return Problem(what, f"{without}, or use {KNOWN} on a GPU")
    return None if can_copy(current_platform) else Problem("KV connectors", f"{without}: {KNOWN} copies only on GPUs")


def _refused(name: Any, module: Any, extra: Mapping[str, Any]) -> str | None:
    """What is refused about a connector, or about the first of several that is refused."""
    if module:
        return f"the KV connector {name} of {module}, which has not been tried"
    if name == SEVERAL:
        listed = extra.get("connectors") or [{}]
        found = (
            _refused(
                one.get("kv_connector"),
                one.get("kv_connector_module_path"),
                one.get("kv_connector_extra_config") or {},
            )
            for one in listed
        )
        return next(filter(None, found), None)
    if name == KNOWN:
        return None
    return f"the KV connector {name}, which {REFUSED.get(name, 'has not been tried')}"


def choose_connector(vllm_config: VllmConfig) -> None:
    """Have the known connector serve --kv-offloading-size. vLLM's own choice for it, OffloadingConnector, crashes where
    it meets kinds of layers other than vLLM's, as sinks and sidecars are."""
    from vllm.config import KVTransferConfig

    cache = vllm_config.cache_config
    if not cache.kv_offloading_size:
        return
    transfer = vllm_config.kv_transfer_config or KVTransferConfig()
    transfer.kv_connector, transfer.kv_role = KNOWN, "kv_both"
    transfer.kv_connector_extra_config["cpu_bytes_to_use"] = cache.kv_offloading_size * (1 << 30)
    vllm_config.kv_transfer_config, cache.kv_offloading_size = transfer, None
    logger.info("kvq: --kv-offloading-size is served by %s", KNOWN)


def store_problem(vllm_config: VllmConfig, fingerprint: str) -> Problem | None:
    """A store whose pages the user knows to have another fingerprint than this server's: it would find none of them."""
    transfer = vllm_config.kv_transfer_config
    # the workers' configuration, and every copy that vLLM makes, has been marked already
    if transfer is None or fingerprints.MARKED in transfer.kv_connector_extra_config:
        return None
    others = [named for named in _named(transfer.kv_connector_extra_config) if named != fingerprint]
    if not others:
        return None
    return Problem(
        f"the store holds pages of fingerprint {others[0]} ({fingerprints.KEY} in kv_connector_extra_config), and this "
        f"server writes pages of {fingerprint}: it would read none of those",
        "serve with the format, options, model and revision of the servers that wrote them, or drop "
        f"{fingerprints.KEY}",
    )


def _named(extra: Mapping[str, Any]) -> Iterator[str]:
    """The fingerprints that a connector's extra configuration names, and those of the connectors that it lists."""
    if fingerprints.KEY in extra:
        yield str(extra[fingerprints.KEY])
    for one in extra.get("connectors") or ():
        yield from _named(one.get("kv_connector_extra_config") or {})


def mark_connector(vllm_config: VllmConfig, fingerprint: str) -> None:
    """Hand the fingerprint to whoever makes a connector's keys (patches/registered/fingerprints.py)."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    transfer.kv_connector_extra_config.update({fingerprints.KEY: fingerprint, fingerprints.MARKED: True})
    logger.info_once(
        "kvq: %s keeps pages under the fingerprint %s; pages with other fingerprints are not found",
        transfer.kv_connector,
        fingerprint,
    )


def can_copy(platform: Platform) -> bool:
    """Whether vLLM's copier runs there."""
    return bool(platform.is_cuda())

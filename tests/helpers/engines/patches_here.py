"""The patches that this vLLM needs, for the tests of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_kvq.integration.patches.patch import Patch
from vllm_kvq.integration.patches.registry import PATCHES

HERE = [patch for patch in PATCHES if patch.of_this_vllm]
WRAPS = [patch for patch in HERE if patch.replaces]


def named(patch: Any) -> str:
    return patch.what[:40] if isinstance(patch, Patch) else str(patch).rsplit(".", 1)[-1]


def everything() -> Any:
    """A configuration that needs every patch."""
    text = SimpleNamespace(num_kv_shared_layers=2)
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=True, hf_text_config=text),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(kv_offloading_size=None, cache_dtype="squat2"),
        kv_transfer_config=object(),
        lora_config=object(),
        use_v2_model_runner=True,
    )

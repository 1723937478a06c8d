"""How many blocks the soak's server gets, counted without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.slots import SlotGeometry


def blocks_of(model: str, pool: float, cache: dict[str, Any]) -> int:
    """Pages, sidecar and sinks of `pool` requests of the maximum length, and block 0, which vLLM never hands out."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    geometry = Geometry(config["head_dim"], cache["block_size"], getattr(torch, cache["dtype"]))
    slots = SlotGeometry.of(get_format(cache["kv_cache_dtype"]).bind(geometry, {}), config["num_key_value_heads"], 0)
    pages = -(-cache["max_model_len"] // cache["block_size"])
    return 1 + int(pool * (pages + slots.sidecar_blocks + slots.sink_blocks))

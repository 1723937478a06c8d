"""What the plugin says: one line at start-up that counts every exception, and a warning when inputs were damaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration.drafts import draft_layers, draft_token_bytes
from vllm_kvq.integration.sidecar import SlotGeometry
from vllm_kvq.integration.windows import WINDOWS, fitting_block, window_layers

logger = init_logger("vllm.kvq")


@dataclass(frozen=True)
class Kind:
    """Layers of one kind: how many, and what one request of the maximum length takes in each."""

    layers: int
    blocks: int
    plain_bytes: int
    """What it would take in a plain 16-bit cache."""


def start_line(
    fmt: PageFormat, slots: SlotGeometry, blocks: int, max_len: int, exempt: list[str], kinds: list[Kind]
) -> str:
    """Capacity as vLLM counts it: tokens of requests of the maximum length, with their sidecars and sink pages.

    A block of the pool is one page in each layer of a KV cache group, and vLLM makes all groups as large as the
    smallest kind of layers, or as the largest where they hardly differ.
    """
    smallest, largest = min(k.layers for k in kinds), max(k.layers for k in kinds)
    size = largest if largest < 1.5 * smallest else smallest
    per_request = sum(-(-k.layers // size) * k.blocks for k in kinds)
    # block 0 is never handed out
    capacity = (blocks - 1) / per_request * max_len
    plain = blocks * size * slots.page_bytes / sum(k.layers * k.plain_bytes for k in kinds) * max_len
    sidecar = (slots.sidecar_blocks + slots.sink_blocks) * slots.page_bytes
    return (
        f"kvq: format={fmt.name} bits={fmt.bits_per_element:.3f} N={fmt.N} W={fmt.W} S={fmt.S} "
        f"sidecar_bytes={sidecar} (per request and layer) exempt={','.join(exempt) or 'none'} "
        f"capacity_tokens={int(capacity)} bf16_tokens={int(plain)} ratio={capacity / plain:.2f} "
        f"(requests of {max_len} tokens)"
    )


def report_start(fmt: PageFormat, slots: SlotGeometry, blocks: int, vllm_config: Any) -> None:
    from vllm.distributed.parallel_state import is_global_first_rank

    if is_global_first_rank():
        exempt = [*vllm_config.cache_config.kv_cache_dtype_skip_layers]
        if draft_token_bytes(vllm_config):
            exempt.append("draft")
        max_len = vllm_config.model_config.max_model_len
        logger.info("%s", start_line(fmt, slots, blocks, max_len, exempt, _kinds(fmt, slots, vllm_config)))


def _kinds(fmt: PageFormat, slots: SlotGeometry, vllm_config: Any) -> list[Kind]:
    model, skip = vllm_config.model_config, vllm_config.cache_config.kv_cache_dtype_skip_layers
    max_len, sixteen = model.max_model_len, 4 * slots.heads * slots.head_size
    windows = window_layers(model) if WINDOWS in skip else 0
    skipped = sum(layer.isdigit() for layer in skip)
    packed = -(-max_len // fmt.N) + slots.sidecar_blocks + slots.sink_blocks
    kinds = [Kind(model.get_total_num_hidden_layers() - windows - skipped, packed, max_len * sixteen)]

    block = fitting_block(slots.page_bytes, slots.slot_bytes)
    if skipped:
        kinds.append(Kind(skipped, -(-max_len // block), max_len * sixteen))
    if windows:
        # as vLLM counts a window: one block more, for it begins anywhere
        seen = min(model.get_sliding_window() - 1 + vllm_config.scheduler_config.max_num_batched_tokens, max_len)
        kinds.append(Kind(windows, -(-seen // block) + 1, seen * sixteen))
    if draft := draft_token_bytes(vllm_config):
        own = fitting_block(slots.page_bytes, draft, fmt.N)
        plain = draft * 2 // slots.itemsize
        kinds.append(Kind(draft_layers(vllm_config.speculative_config), -(-max_len // own), max_len * plain))
    return kinds


class Damage:
    """Counts keys and values that were not finite or too large for a format and had to be replaced."""

    def __init__(self, layer: str) -> None:
        self.layer, self.total, self.said = layer, 0, 0

    def count(self, replaced: torch.Tensor | int) -> None:
        new = int(replaced)
        if not new:
            return
        self.total += new
        if self.total >= 10 * self.said:
            self.said = self.total
            logger.warning(
                "kvq: %s: %d keys or values were inf, nan or beyond +-32768 so far and were replaced before packing; "
                "the model's activations are broken or need --kv-cache-dtype auto",
                self.layer,
                self.total,
            )

"""What the plugin says: one line at start-up that counts every exception, and a warning when inputs were damaged."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration.sidecar import SlotGeometry
from vllm_kvq.integration.windows import SMALLEST_BLOCK, WINDOWS

logger = init_logger("vllm.kvq")


def start_line(fmt: PageFormat, slots: SlotGeometry, blocks: int, max_len: int, exempt: list[str], layers: int) -> str:
    """Capacity as vLLM counts it: tokens of requests of the maximum length, with their sidecars and sink pages.

    Where whole layers stay in 16 bits, only the ratio is ours to tell: the tokens depend on how vLLM groups layers.
    """
    per_request = -(-max_len // fmt.N) + slots.sidecar_blocks + slots.sink_blocks
    # block 0 is never handed out
    capacity = (blocks - 1) / per_request * max_len
    plain = blocks * slots.page_bytes / (2 * slots.heads * slots.head_size * 2)
    sidecar = (slots.sidecar_blocks + slots.sink_blocks) * slots.page_bytes
    tokens = f"capacity_tokens={int(capacity)} bf16_tokens={int(plain)} ratio={capacity / plain:.2f}"
    if skipped := sum(layer.isdigit() for layer in exempt):
        block = slots.page_bytes // slots.slot_bytes // SMALLEST_BLOCK * SMALLEST_BLOCK
        pages = (layers - skipped) * per_request + skipped * -(-max_len // block)
        ratio = layers * max_len * 4 * slots.heads * slots.head_size / (pages * slots.page_bytes)
        tokens = f"ratio={ratio:.2f} with {skipped} of {layers} layers in 16 bits; tokens: see vLLM's line"
    return (
        f"kvq: format={fmt.name} bits={fmt.bits_per_element:.3f} N={fmt.N} W={fmt.W} S={fmt.S} "
        f"sidecar_bytes={sidecar} (per request and layer) exempt={','.join(exempt) or 'none'} "
        f"{tokens} "
        f"(requests of {max_len} tokens{', what window layers take aside' if WINDOWS in exempt else ''})"
    )


def report_start(fmt: PageFormat, slots: SlotGeometry, blocks: int, vllm_config: Any) -> None:
    from vllm.distributed.parallel_state import is_global_first_rank

    if is_global_first_rank():
        exempt = vllm_config.cache_config.kv_cache_dtype_skip_layers
        model = vllm_config.model_config
        layers = model.get_total_num_hidden_layers()
        logger.info("%s", start_line(fmt, slots, blocks, model.max_model_len, exempt, layers))


class Damage:
    """Counts keys and values that were not finite or too large for a format and had to be replaced."""

    def __init__(self, layer: str) -> None:
        self.layer, self.total, self.said = layer, 0, 0

    def count(self, replaced: torch.Tensor) -> None:
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

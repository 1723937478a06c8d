"""What the plugin says: one line at start-up that counts every exception, and a warning when inputs were damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats.by_layer import written
from vllm_kvq.integration import metrics
from vllm_kvq.integration.advice.hints import hints
from vllm_kvq.integration.plan.plan import with_calibration
from vllm_kvq.integration.plan.served import Served

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvq")


@dataclass(frozen=True)
class Capacity:
    """What a pool of this size holds: tokens of requests of the maximum length, with their sidecars and sinks.

    It is the very number of vLLM's own line "KV cache size", which counts block 0, too, though it is never handed out.
    With windows it is larger: vLLM's line counts for each request the blocks that a window takes while a whole step
    computes a piece of its prompt. One request at a time needs these; here one is counted with them, the others with
    what they keep.
    """

    tokens: int
    plain_tokens: int
    """A bf16 cache of the same bytes."""
    ratio: float
    per_request: int
    """`Pool.per_request`."""

    @classmethod
    def of(cls, served: Served, blocks: int) -> Capacity:
        pool = served.pool
        kinds, size, per_request, freed = pool.kinds, pool.block_bytes, pool.per_request, pool.freed
        tokens = requests(blocks, per_request, freed) * served.max_len
        whole, part = sum(k.layers * k.plain_bytes for k in kinds), sum(k.layers * k.plain_freed for k in kinds)
        plain = requests(blocks * size, whole, part) * served.max_len
        return cls(int(tokens), int(plain), tokens / plain if blocks else 0.0, per_request)


def requests(pool: int, most: int, freed: int) -> float:
    """How many requests share a pool, each of which takes `most` while its prompt is computed and then `freed` less."""
    return 1 + (pool - 1 - most) / (most - freed) if freed and pool > most else pool / most


def start_line(served: Served, blocks: int) -> str:
    """A value is one word, so that programs can read the line (`proof/demo/capacity.py`)."""
    fmt, capacity = served.format, Capacity.of(served, blocks)
    constants = f"constants={served.calibration.found} " if served.calibration else ""
    sidecar = round((served.sidecar_blocks + served.sink_blocks) * served.page_bytes)
    return (
        f"kvq: format={served.label} bits={served.bits_per_element:.3f} "
        f"N={fmt.N} W={fmt.W} S={fmt.S} "
        f"sidecar_bytes={sidecar} (per request and layer) not_packed={','.join(served.not_packed) or 'none'} "
        f"path={served.path.name} "
        f"capacity_tokens={capacity.tokens} bf16_tokens={capacity.plain_tokens} ratio={capacity.ratio:.2f} "
        f"(requests of {served.max_len} tokens) {constants}fingerprint={served.fingerprint}"
    )


def part_lines(served: Served) -> list[str]:
    """What each part of the layers has, where options are given by layer."""
    if len(served.parts) == 1:
        return []
    settings = [dict(part.format.settings.own) for part in served.parts]
    differ = [name for name in settings[0] if any(s[name] != settings[0][name] for s in settings)]
    return [
        f"kvq: {written(part.layers)}: {', '.join(f'{name}={s[name]}' for name in differ)}, "
        f"bits={part.format.bits_per_element:.3f}"
        for part, s in zip(served.parts, settings, strict=True)
    ]


def path_warnings(served: Served) -> list[str]:
    """What is slower here than it could be, a sentence each."""
    path, name = served.path, served.format.name
    why = [f"{name} is served by the slower {path.name} path: {path.why}"] if path.why is not None else []
    return why + ([path.slow] if path.slow is not None else [])


FEWER = 0.9
"""The ratio to bf16's tokens below which a server warns."""


def capacity_warning(capacity: Capacity, max_len: int) -> str | None:
    """Where window, sinks and sidecar take clearly more than the packed pages save.

    No reason to refuse a server: its answers are as good as those of longer requests, and with --max-model-len auto the
    length is known only after the weights are loaded.
    """
    if capacity.tokens >= FEWER * capacity.plain_tokens:
        return None
    return (
        f"requests of {max_len} tokens are so short that fewer fit than with bf16 "
        f"({capacity.tokens:,} tokens against {capacity.plain_tokens:,}); use --kv-cache-dtype auto, or a smaller 'W'"
    )


def report_start(served: Served, vllm_config: VllmConfig, blocks: int) -> None:
    """Once vLLM has decided how many `blocks` the pool has."""
    from vllm.distributed.parallel_state import is_global_first_rank

    # --max-model-len auto: vLLM chose it after the model was loaded
    served = replace(served, max_len=vllm_config.model_config.max_model_len)
    if digest := next(filter(None, map(_calibration, _layers(vllm_config))), None):
        served = with_calibration(vllm_config, served, digest)
    if vllm_config.parallel_config.rank == 0:
        export_start(served, metrics.Series.of(vllm_config), blocks)
    if not is_global_first_rank():
        return
    for line in (start_line(served, blocks), *part_lines(served)):
        logger.info("%s", line)
    short = capacity_warning(Capacity.of(served, blocks), served.max_len)
    for sentence in (*path_warnings(served), *hints(served, vllm_config), *([short] if short else [])):
        logger.warning("kvq: %s", sentence)


def _layers(vllm_config: VllmConfig) -> list[Any]:
    return [*vllm_config.compilation_config.static_forward_context.values()]


def _calibration(layer: Any) -> str | None:
    """The digest of the constants that a packed layer has."""
    packed = getattr(getattr(layer, "impl", None), "packed", None)
    return None if packed is None else packed.calibration


def export_start(served: Served, series: metrics.Series, blocks: int) -> None:
    """What stays as it is, and zeros for what the engine core counts from its first step on."""
    fmt = served.format
    sizes = {"block_size": fmt.N, "window": fmt.W, "sinks": fmt.S}
    labels = {name: str(size) for name, size in sizes.items()}
    labels |= {"fingerprint": served.fingerprint}
    series.set(metrics.INFO, 1, format=served.label, path=served.path.name, **labels)
    series.set(metrics.CAPACITY, Capacity.of(served, blocks).tokens)
    for metric in (metrics.PACKED, metrics.FULL_PRECISION, metrics.SIDECAR_BYTES, metrics.BITS):
        series.set(metric, 0)


class Damage:
    """Counts keys and values that were not finite or too large for a format and had to be replaced."""

    def __init__(self, layer: str, export: Callable[[int], None] = lambda more: None) -> None:
        self.layer, self.export, self.total, self.said = layer, export, 0, 0
        export(0)

    def count(self, replaced: torch.Tensor | int) -> None:
        new = int(replaced)
        if not new:
            return
        self.total += new
        self.export(new)
        if self.total >= 10 * self.said:
            self.said = self.total
            logger.warning(
                "kvq: %s: %d keys or values were inf, nan or beyond +-32768 so far and were replaced before packing; "
                "the model's activations overflow; use --dtype bfloat16 or --kv-cache-dtype auto",
                self.layer,
                self.total,
            )

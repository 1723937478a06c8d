"""What `vllm-kvq check` prints of a server that would start, or would lack only memory or files: as JSON."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from vllm_kvq.integration.advice.hints import hints
from vllm_kvq.integration.plan.memory import cache_memory, gib
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.preview.checkpoint import checkpoint_problem
from vllm_kvq.integration.preview.dry_start import DryStart
from vllm_kvq.integration.worker.report import Capacity, capacity_warning, part_lines
from vllm_kvq.kernels.cpu.library import ISAS, isa
from vllm_kvq.kernels.paths import CPP, Path
from vllm_kvq.problem import Problem


def describe(start: DryStart) -> dict[str, Any]:
    served, config = start.served, start.vllm_config
    fmt, path, memory = served.format, served.path, cache_memory(config)
    page_group = served.pool.block_bytes
    by_layer = [line.removeprefix("kvq: ") for line in part_lines(served)]
    blocks = memory.nbytes * config.parallel_config.pipeline_parallel_size // page_group
    capacity = Capacity.of(served, blocks)
    problem = checkpoint_problem(config) or memory.problem
    if problem is None and blocks <= capacity.per_request:
        problem = Problem(
            f"a request of {served.max_len} tokens takes {gib(capacity.per_request * page_group)} of cache and there "
            f"are {gib(memory.nbytes)} ({memory.because})",
            "lower --max-model-len or give the cache more memory",
        )
    return {
        "starts": problem is None,
        "sentence": None if problem is None else str(problem),
        "model": config.model_config.model,
        "format": fmt.name,
        "budget": None if start.chosen is None else str(start.chosen),
        "label": served.label,
        "fingerprint": served.fingerprint,
        "bits_per_element": served.bits_per_element,
        **{"N": fmt.N, "W": fmt.W, "S": fmt.S},
        "layers": {"packed": served.layers.packed, "all": served.layers.total, "not_packed": list(served.not_packed)},
        "by_layer": by_layer,
        "warnings": hints(served, config),
        "kernels": {
            "path": path.name,
            "isa": instructions(path),
            "why_not_faster": path.why,
            "slow": path.slow,
        },
        "memory": {"bytes": memory.nbytes, "because": memory.because},
        "capacity": {
            "tokens": max(capacity.tokens, 0),
            "bf16_tokens": capacity.plain_tokens,
            "request_tokens": served.max_len,
        },
        "fewer_tokens": capacity_warning(capacity, served.max_len),
        "request_blocks": request_blocks(served),
    }


def instructions(path: Path) -> str | None:
    """What the kernels of this path are compiled for here: an instruction set, or a GPU's architecture."""
    if path.name == CPP:
        return ISAS[isa()]
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return f"sm_{found.to_int()}" if found is not None and path.name.startswith("GPU/") else None


def request_blocks(served: Served) -> dict[str, int]:
    """Blocks of the pool that a request of the maximum length takes, by purpose."""
    full = served.kinds[0].blocks
    return {
        "pages": full - served.sidecar_blocks - served.sink_blocks,
        "sidecar": served.sidecar_blocks,
        "sinks": served.sink_blocks,
        "windows_and_states": served.pool.per_request - full,
    }

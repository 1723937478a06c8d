"""The bits per cached number of a request of a given length: pages, window, sinks, sidecar and headers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvq.eval.choice import FP8, Choice
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.by_layer import options_at
from vllm_kvq.integration.preview.dry_start import WouldNotStart, dry_start, without_kernels

if TYPE_CHECKING:
    from vllm_kvq.integration.plan.served import Served

PLAIN_BITS = 16
"""The bits with which `Kind.plain_bytes` counts."""


def bits_at(served: Served, tokens: int) -> float:
    """Bits per number: what whole blocks take, as vLLM allocates them, against the same numbers in 16 bits; including
    layers not packed."""
    served = replace(served, max_len=tokens)
    taken = served.pool.per_request * served.pool.block_bytes
    return PLAIN_BITS * taken / sum(kind.layers * kind.plain_bytes for kind in served.kinds)


def plain_bits(dtype: str, model_dtype: Any) -> float:
    """The bits of vLLM's own caches; their scales are one number per layer."""
    return 8.0 if dtype.startswith("fp8") else 8.0 * model_dtype.itemsize


def served_bits(folder: str, choice: Choice, dtype: str, tokens: int) -> float:
    """By the plan of a server with this choice. WouldNotStart, with the reason, if it would not start."""
    return bits_at(_served(folder, choice, dtype, tokens), tokens)


def _served(folder: str, choice: Choice, dtype: str, tokens: int) -> Served:
    arguments = {
        "--kv-cache-dtype": choice.format,
        "--additional-config": json.dumps({"kvq": dict(choice.options)}),
        "--dtype": dtype,
        "--max-model-len": str(tokens),
        # bits do not depend on it, but vLLM's default may not be free
        "--kv-cache-memory-bytes": "1G",
    }
    return dry_start([folder, *(word for pair in arguments.items() for word in pair)]).served


def bits_without_engine(folder: str, choice: Choice, dtype: str, tokens: int) -> float | None:
    """The bits of a request; None if no server would start. Formats that can only be measured count as if one would."""
    if not choice.ours:
        return _plain(choice, dtype)
    try:
        from vllm_kvq.integration.plan.plan import counting  # imports vllm

        with counting(), without_kernels():
            return bits_at(_served(folder, choice, dtype, tokens), tokens)
    except WouldNotStart:
        return None


def page_bits(choice: Choice, head_size: int, dtype: str) -> float:
    """Per cached number in a packed page, which is what a long context approaches in the layers that are packed."""
    if not choice.ours:
        return _plain(choice, dtype)
    from vllm_kvq.integration.plan.plan import CPU_BLOCK  # imports vllm

    options = options_at(choice.options, None)
    fmt = get_format(choice.format)
    block = fmt.settings(options).N or CPU_BLOCK
    return fmt.bind(Geometry(head_size, block, getattr(torch, dtype)), options).bits_per_element


def _plain(choice: Choice, dtype: str) -> float:
    return plain_bits("fp8" if choice.format == FP8 else dtype, getattr(torch, dtype))

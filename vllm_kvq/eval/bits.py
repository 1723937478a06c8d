"""What a request of some length takes per cached number: pages, window, sinks, sidecar and headers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from vllm_kvq.eval.choice import FP8, Choice
from vllm_kvq.integration.dry_start import WouldNotStart, dry_start
from vllm_kvq.integration.served import Served

PLAIN_BITS = 16
"""What `Kind.plain_bytes` counts with."""


def bits_at(served: Served, tokens: int) -> float:
    """Whole blocks, as vLLM gives them out, against the same numbers in 16 bits; layers in 16 bits count, too."""
    served = replace(served, max_len=tokens)
    taken = served.pool.per_request * served.pool.block_bytes
    return PLAIN_BITS * taken / sum(kind.layers * kind.plain_bytes for kind in served.kinds)


def plain_bits(dtype: str, model_dtype: Any) -> float:
    """Of vLLM's own caches; their scales are one number per layer."""
    return 8.0 if dtype.startswith("fp8") else 8.0 * model_dtype.itemsize


def served_bits(folder: str, choice: Choice, dtype: str, tokens: int) -> float:
    """Of a server that would start with this choice; WouldNotStart with the sentence where it would not."""
    arguments = {
        "--kv-cache-dtype": choice.format,
        "--additional-config": json.dumps({"kvq": dict(choice.options)}),
        "--dtype": dtype,
        "--max-model-len": str(tokens),
        # not what bits depend on, but vLLM's default may not be free
        "--kv-cache-memory-bytes": "1G",
    }
    served = dry_start([folder, *(word for pair in arguments.items() for word in pair)]).served
    return bits_at(served, tokens)


def bits_without_engine(folder: str, choice: Choice, dtype: str, tokens: int) -> float | None:
    """None where no server would start with it: a format that can be measured only."""
    if not choice.ours:
        import torch

        return plain_bits("fp8" if choice.format == FP8 else dtype, getattr(torch, dtype))
    # bits are those of any kernels, and compiling the C++ ones for them would take minutes
    kernels = os.environ.get("VLLM_KVQ_KERNELS")
    os.environ["VLLM_KVQ_KERNELS"] = "torch"
    try:
        return served_bits(folder, choice, dtype, tokens)
    except WouldNotStart:
        return None
    finally:
        if kernels is None:
            del os.environ["VLLM_KVQ_KERNELS"]
        else:
            os.environ["VLLM_KVQ_KERNELS"] = kernels

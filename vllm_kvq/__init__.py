"""Low-bit KV caches for vLLM: SQuat, QJL, PolarQuant, InnerQ, KIVI and Kitty as attention backends.

    vllm serve MODEL --kv-cache-dtype squat2

This module is usable without vllm installed: `roundtrip` shows what a format does to keys and values, and
`FORMATS[name].bits_per_element(head_size, block_size)` what it costs.
"""

from vllm_kvq.formats import FORMATS, roundtrip

__version__ = "0.1.0"

__all__ = ["FORMATS", "__version__", "roundtrip"]

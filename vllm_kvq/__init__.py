"""Low-bit KV caches for vLLM: transform coding (klt), SQuat, QJL, PolarQuant, InnerQ, KIVI and Kitty.

    vllm serve MODEL --kv-cache-dtype kvq3

This module is usable without vllm installed: `roundtrip` shows what a format does to keys and values, and
`FORMATS[name].bits_per_element(head_size, block_size)` what it costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvq.formats.roundtrip import roundtrip
    from vllm_kvq.formats.table import FORMATS

__version__ = "0.1.0"

__all__ = ["FORMATS", "__version__", "roundtrip"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: a mistyped command should not wait for it."""
    if name in __all__:
        from vllm_kvq import formats

        return getattr(formats, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

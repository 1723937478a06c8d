"""The name and the cache of this processor, for figures that are meaningless without them."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name and name != "unknown"), platform.processor() or platform.machine())


USUAL_CACHE = 32 << 20
"""Bytes, where the system does not say."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache() -> int:
    """Bytes of the largest cache that the first core reaches."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1))
    return max(sizes, default=USUAL_CACHE)

"""The name of this processor, for figures that are meaningless without it."""

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

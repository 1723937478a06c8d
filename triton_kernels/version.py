"""The version of Triton."""

from __future__ import annotations

import functools


@functools.cache
def old_triton() -> bool:
    """Before 3.7 (torch 2.11 has 3.6), data lies in different lanes and takes a different number of registers."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)

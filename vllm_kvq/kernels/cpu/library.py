"""The compiled library of csrc/cpu, and the instruction set that its kernels use.

Built and loaded at the first call. If that fails (no compiler), one warning is logged and the PyTorch kernels serve
instead. $VLLM_KVQ_ISA = portable | avx2 | avx512bw | avx512 lowers the instruction set, for tests.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from vllm_kvq.kernels.build import BuildError, load

logger = logging.getLogger(__name__)

ISAS = ("portable", "avx2", "avx512bw", "avx512")
"""In the library's order, whose indices `best_isa` and every call use."""


@functools.cache
def library() -> Any | None:
    """The loaded library; None (after one warning) if it is not available."""
    try:
        loaded = load()
    except BuildError as error:
        reason = str(error).strip().splitlines()[-1]
        logger.warning("vllm_kvq: no C++ kernels, using the slower PyTorch ones: %s", reason)
        return None
    known = tuple(str(loaded.names("isas")).split())
    if known != ISAS[: len(known)]:
        raise RuntimeError(f"the library's instruction sets are {known}, not {ISAS}")
    return loaded


@functools.cache
def isa() -> int:
    """The instruction set in use, as an index into ISAS."""
    lib = library()
    best = int(lib.best_isa()) if lib is not None else 0
    wanted = os.environ.get("VLLM_KVQ_ISA", "")
    if wanted and wanted not in ISAS:
        raise ValueError(f"VLLM_KVQ_ISA is {wanted!r}; it takes one of {', '.join(ISAS)}")
    return min(best, ISAS.index(wanted)) if wanted else best

"""Formats that stand for all others with the same kernels: taken from the table, so a new method is among them."""

from __future__ import annotations

from vllm_kvq.formats.table import FORMATS, suite

METHODS = (*suite("methods"), "lossless")
"""One format of each method, and the one that loses nothing."""
KINDS = tuple(
    name
    for name in suite("methods")
    if FORMATS[name].keys.name not in ("kivi", "kitty") and not FORMATS[name].keys.calibrated
)
"""Fewer, for slow tests. KIVI and Kitty store the fields that SQuat stores, and are attended as SQuat is; a
calibrated format would first fit its constants, which engine/worker/test_calibration.py tests."""

"""What the fuzz tests of the C++ kernels share: cases and shapes."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vllm_kvq.bench.pools import calibrated
from vllm_kvq.eval.peers import PEERS
from vllm_kvq.formats import FORMATS, Geometry, PageFormat, get_format

IN_CPP = [name for name in FORMATS if name not in PEERS]
"""Formats that the C++ kernels serve."""

EXAMPLES = int(os.environ.get("KVQ_FUZZ_EXAMPLES", "6"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
thorough_fuzz = settings(fuzz, max_examples=5 * EXAMPLES)
"""For tests of what does not depend on the format, which are few."""
CASES = [(name, ()) for name in IN_CPP] + [
    ("polar4", (("mode", "paper"),)),
    ("polar3", (("angle_bits", 3),)),
    ("qjl3", (("m", 256), ("m_out", 32), ("outliers", 5))),
    ("qjl3", (("outliers", 0),)),
    ("klt2", (("key_rate", 5.0), ("searched_bits", 3))),
    ("squat4", (("group", 48), ("value_bits", 2), ("r", 63))),
    ("innerq2", (("key_bits", 4), ("value_bits", 4), ("quant_mode", "asymmetric"), ("key_norm", "none"))),
]
WILD = st.sampled_from([-(1 << 63), -(1 << 40), -1, 1 << 31, 1 << 40, (1 << 63) - 1])


@functools.cache
def bound(
    name: str, options: tuple[tuple[str, Any], ...], d: int, N: int, dtype: torch.dtype = torch.float16, heads: int = 1
) -> PageFormat:
    return calibrated(get_format(name).bind(Geometry(d, N, dtype), dict(options)), heads)


def shapes(draw: st.DrawFn, case: tuple[str, tuple[tuple[str, Any], ...]] | None = None) -> dict[str, Any]:
    """With a head size that the format of the case supports: QJL's outlier numbers are bytes."""
    narrow = case is not None and case[0] == "qjl3" and ("outliers", 0) not in case[1]
    return {
        "d": draw(st.sampled_from([64, 80, 128, 256] if narrow else [64, 80, 128, 256, 512])),
        "N": draw(st.sampled_from([32, 64, 96])),
        "heads": draw(st.integers(1, 2)),
        "group": draw(st.sampled_from([1, 2, 3, 4, 7])),
        "requests": draw(st.integers(1, 3)),
        "q": draw(st.sampled_from([1, 2, 20, 110])),  # with enough rows, pages are unpacked for all at once
        "threads": draw(st.sampled_from([1, 2, 4])),
        "seed": draw(st.integers(0, 1 << 30)),
        "pages": draw(st.integers(1, 4)),
        "listed": draw(st.integers(0, 9)),
    }

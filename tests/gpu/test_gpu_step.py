"""A layer's whole step on a real device: as a pytest module, or `python3 tests/gpu/test_gpu_step.py [--dry-run]`."""

from __future__ import annotations

import sys

import torch
from parallel import DEVICE, main

from proof.kernels.step_traffic import StepTraffic
from vllm_kvq.formats import Geometry, get_format

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
except ImportError:
    pass

FORMATS = ("squat2", "kivi4", "innerq2", "polar4", "polar3", "kitty2", "qjl3")


def step(name: str, d: int, dtype: torch.dtype, graph: bool) -> None:
    """Without a graph, a decode step that waits for the device is an error."""
    fmt = get_format(name).bind(Geometry(d, 64, dtype), {} if DEVICE == "cuda" else {"W": 32})
    traffic = StepTraffic(fmt, torch.device(DEVICE))
    traffic.prompts((fmt.W + 131, 1) if DEVICE == "cuda" else (fmt.W + 33, 1))
    traffic.decode(70 if DEVICE == "cuda" else 1, graph)
    # a sign that rounds the other way costs QJL more
    bound = 2e-3 if dtype == torch.float32 and name != "qjl3" else 1e-2
    assert traffic.worst < bound, f"{traffic.worst:.1e}"
    assert not int(traffic.step.faults[0])


STEPS = [
    (step, (name, d, dtype, False))
    for name in FORMATS
    for d, dtype in ((64, torch.float32), (128, torch.bfloat16))
]  # fmt: skip
GRAPHS = [(step, (name, 128, torch.bfloat16, True)) for name in FORMATS]


def test_decode_without_host_synchronisation() -> None:
    for case, arguments in STEPS:
        case(*arguments)


def test_decode_by_one_captured_graph() -> None:
    for case, arguments in GRAPHS:
        case(*arguments)


if __name__ == "__main__":
    cases = [*GRAPHS, *STEPS] if DEVICE == "cuda" else STEPS
    main([c for c in cases if "--without-cuda" not in sys.argv or c[1][0] != "qjl3"])

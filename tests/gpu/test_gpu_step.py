"""A layer's whole step on a real device: as a pytest module, or `python3 tests/gpu/test_gpu_step.py`.

No GPU has run this yet.
"""

from __future__ import annotations

import sys
import traceback

import torch

from vllm_kvq.eval.step_traffic import StepTraffic
from vllm_kvq.formats import Geometry, get_format

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
except ImportError:
    pass

FORMATS = ("squat2", "kivi4", "innerq2", "polar4", "polar3", "qjl3")


def _traffic(name: str, d: int, dtype: torch.dtype) -> StepTraffic:
    fmt = get_format(name).bind(Geometry(d, 64, dtype))
    traffic = StepTraffic(fmt, torch.device("cuda"))
    traffic.prompts((fmt.W + 131, 1))
    return traffic


def test_decode_without_host_synchronisation() -> None:
    for name in FORMATS:
        # a sign that rounds the other way costs QJL more
        exact = 1e-2 if name == "qjl3" else 2e-3
        for d, dtype, bound in ((64, torch.float32, exact), (128, torch.bfloat16, 1e-2)):
            traffic = _traffic(name, d, dtype)
            traffic.decode(70)
            assert traffic.worst < bound, f"{name} d={d} {dtype}: {traffic.worst:.1e}"
            assert not int(traffic.step.faults[0])


def test_decode_by_one_captured_graph() -> None:
    for name in FORMATS:
        traffic = _traffic(name, 128, torch.bfloat16)
        traffic.decode(70, graph=True)
        assert traffic.worst < 1e-2, f"{name}: {traffic.worst:.1e}"
        assert not int(traffic.step.faults[0])


def main() -> int:
    failed = 0
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            try:
                test()
                print(f"passed {name}", flush=True)
            except Exception:
                failed += 1
                traceback.print_exc()
                print(f"FAILED {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

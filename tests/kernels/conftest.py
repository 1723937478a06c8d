"""Every instruction set of this machine, as an index into `cpu.ISAS`."""

from __future__ import annotations

import pytest

from vllm_kvq.kernels import cpu


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> int:
    level = cpu.ISAS.index(request.param)
    if level > int(cpu.library().best_isa()):
        pytest.skip(f"this processor has no {request.param}")
    return level

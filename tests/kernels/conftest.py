"""Every instruction set of this machine, as an index into `ISAS`; calls of the kernels use that one."""

from __future__ import annotations

import pytest

from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import pack as cpu_pack
from vllm_kvq.kernels.cpu import step as cpu_decode
from vllm_kvq.kernels.cpu.library import ISAS, library


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    level = ISAS.index(request.param)
    if level > int(library().best_isa()):
        pytest.skip(f"this processor has no {request.param}")
    for module in (cpu, cpu_decode, cpu_pack):
        monkeypatch.setattr(module, "isa", lambda: level)
    return level

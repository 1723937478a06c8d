"""Every instruction set of this machine, as an index into `cpu.ISAS`; what calls the kernels takes that one."""

from __future__ import annotations

import pytest

from vllm_kvq.kernels import cpu, cpu_decode, cpu_pack


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    level = cpu.ISAS.index(request.param)
    if level > int(cpu.library().best_isa()):
        pytest.skip(f"this processor has no {request.param}")
    for module in (cpu, cpu_decode, cpu_pack):
        monkeypatch.setattr(module, "isa", lambda: level)
    return level

"""Every instruction set of this machine, as an index into `ISAS`; calls of the kernels use that one."""

from __future__ import annotations

import pytest

from vllm_kvq.kernels.cpu import call
from vllm_kvq.kernels.cpu.library import ISAS, library


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    level = ISAS.index(request.param)
    if level > int(library().best_isa()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(call, "isa", lambda: level)
    return level

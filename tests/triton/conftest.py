"""The kernels under Triton's interpreter, or from their PTX (`python -m proof ptx -m pytest tests/triton`)."""

import pytest
from one_thread import one_thread

pytest.importorskip("triton")

from proof.interpreter import quicken
from vllm_kvq.kernels.gpu.loading import interpreted, load

load()
if interpreted():
    quicken()

__all__ = ["one_thread"]

"""The kernels under Triton's interpreter: switched on for our modules alone, whatever else uses Triton here."""

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    from vllm_kvq.triton_kernels import decode, keys, lang, merge, pack, raw, step, values  # noqa: F401
finally:
    if _before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _before


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

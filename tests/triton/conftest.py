"""The kernels under Triton's interpreter, or from their PTX (`python -m proof ptx -m pytest tests/triton`)."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from vllm_kvq.kernels.gpu.loading import load

load()


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

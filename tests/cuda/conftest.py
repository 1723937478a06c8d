"""The CUDA source on CPU tensors: lanes are fibers, matrix products are software (csrc/cuda/emulate.h)."""

from collections.abc import Iterator

import pytest
import torch

from vllm_kvq.kernels.gpu import loading

loading.load()  # parts are merged by Triton's kernel, under its interpreter


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

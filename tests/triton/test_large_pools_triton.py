"""Pools beyond 2, 4 and 8 GiB on a GPU's path, with Triton's kernels."""

from __future__ import annotations

import pytest
import torch
from large_pools import compare

from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.step import Prompts
from vllm_kvq.kernels.torch.attend import causal, whole


@pytest.mark.parametrize("name", ["squat2", *(pytest.param(n, marks=pytest.mark.wide) for n in ("innerq2", "polar4"))])
def test_triton(name: str) -> None:
    compare(
        name,
        lambda x: GPUStep(x.fmt, x.slots, x.drafts, x.scale, torch.device("cpu"), Prompts(causal, whole)),
        heads=1,
        prompt=False,
    )

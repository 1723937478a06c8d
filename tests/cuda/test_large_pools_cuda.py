"""Pools beyond 2 and 4 GiB on a GPU's path, with the CUDA kernels."""

from __future__ import annotations

import torch
from large_pools import compare

from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.step import Prompts
from vllm_kvq.kernels.torch.attend import causal, whole


def test_cuda() -> None:
    compare(
        "qjl3",
        lambda x: GPUStep(x.fmt, x.slots, x.drafts, x.scale, torch.device("cpu"), Prompts(causal, whole)),
        heads=1,
        prompt=False,
    )

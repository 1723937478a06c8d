"""vLLM's wheel holds its CPU kernels three times, and a process may load only one: the one that vLLM chose."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

COMPARE = """
import torch
torch.cpu.{unsupported} = lambda: False
from vllm_kvq.integration.worker.prompts import Asked, prompts_for
torch.manual_seed(0)
query, key, value = torch.randn(2, 150, 4, 64), torch.randn(2, 150, 2, 64), torch.randn(2, 150, 2, 64)
by_head = [x.transpose(1, 2) for x in (query, key, value)]
expected = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, scale=0.1, enable_gqa=True)
start = torch.tensor([0, 150, 300], dtype=torch.int32)
causal = prompts_for(Asked(torch.device("cpu"), torch.float32, 64, False)).causal
out, lse = causal(*(x.flatten(0, 1) for x in (query, key, value)), start, (150, 150), 0.1)
assert lse is None, "vLLM's kernel returns none"
print(float((out.unflatten(0, (2, 150)) - expected.transpose(1, 2)).abs().max()))
"""


@pytest.mark.parametrize(
    "unsupported", ["_is_avx512_supported", pytest.param("_is_avx512_bf16_supported", marks=pytest.mark.wide)]
)
def test_processors_without(unsupported: str) -> None:
    code = COMPARE.format(unsupported=unsupported)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-5

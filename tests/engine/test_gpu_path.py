"""The GPU's path through a real engine, on the CPU: the reference's tokens. Triton's kernels run under its interpreter,
QJL's CUDA kernels lane by lane in C++ (csrc/cuda/emulate.h). Few tokens, because it is slow.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import traces

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.integration.plan import refusals
from vllm_kvq.integration.worker import prompts
from vllm_kvq.integration.worker.prompts import Asked
from vllm_kvq.kernels.gpu import build as build_cuda

pytestmark = pytest.mark.engine
N, SPEC = 32, 2
NGRAM = {"method": "ngram", "num_speculative_tokens": SPEC, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
FORMATS = {"squat2": {"W": 32}, "innerq2": {"W": 32, "S": 8}, "polar4": {"W": 32, "S": 0}, "qjl3": {"W": 32}}
FORMATS |= {"klt3": {"W": 32}}
OFTEN = "qjl3"
"""The others take a minute each; squat2 also runs in test_v2.py."""


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("name", [n if n == OFTEN else pytest.param(n, marks=pytest.mark.wide) for n in FORMATS])
def test_tokens_are_the_references(name: str, run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = FORMATS[name]
    monkeypatch.setenv("VLLM_KVQ_GPU_PATH", "1")
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    todo = traces.few(N)
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "speculative_config": NGRAM, "max_model_len": 256}
    got = run(todo, kv_cache_dtype=name, block_size=N, additional_config={"kvq": options}, **engine)
    total = judge(ReplayModel(str(model), name, N, SPEC, kernel_error=1e-3, **options), todo, got)
    assert not total.mismatches
    assert total.tokens == 28
    assert total.hits >= 1
    assert total.rejected > 0
    assert total.ties <= 2


@pytest.mark.wide
def test_beside_a_layer_in_16_bits(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two sizes side by side, and a hit that covers the window, too."""
    monkeypatch.setenv("VLLM_KVQ_GPU_PATH", "1")
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    options, todo = {"W": 32, "recompute": 0, "skip_layers": [0]}, traces.few(N)
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}
    got = run(todo, kv_cache_dtype="squat2", block_size=N, additional_config={"kvq": options}, **engine)
    reference = ReplayModel(str(model), "squat2", N, kernel_error=1e-3, **options)
    total = judge(reference, todo, got)
    assert not total.mismatches
    assert total.hits >= 1
    assert total.ties <= 2


def test_capabilities() -> None:
    assert all(refusals.capability_problem(c) is None for c in [(8, 0), (8, 6), (9, 0), (12, 0)])
    assert "7.5" in str(refusals.capability_problem((7, 5)))


def test_qjl_without_nvcc_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    monkeypatch.setattr(build_cuda, "nvcc", lambda: None)
    qjl, squat = (get_format(name).bind(Geometry(64, 32)) for name in ("qjl3", "squat2"))
    assert "no nvcc on the path" in (refusals.why_no_kernels(qjl, (9, 0)) or "")
    assert refusals.why_no_kernels(squat, (9, 0)) is None


@pytest.mark.parametrize("merged", [False, True])
def test_prompts_under_a_soft_cap(merged: bool) -> None:
    """vLLM's own CPU attention, and PyTorch's. xFormers has no soft cap."""
    asked = Asked(torch.device("cpu"), torch.float32, 64, merged, capped=True)
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(150, h, 64, generator=rng) for h in (4, 2, 2))
    k, v = (x.repeat_interleave(2, 1).double() for x in (key, value))
    out, lse = prompts.prompts_for(asked).causal(query, key, value, torch.tensor([0, 150]).int(), (150,), 0.3, 2.0)
    scores = 2 * torch.tanh(0.3 * torch.einsum("qhd,thd->qht", query.double(), k) / 2)
    later = torch.ones(150, 150).triu(1).bool()[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    assert (out - torch.einsum("qht,thd->qhd", scores.softmax(-1), v)).abs().max() < 1e-5
    assert (lse is not None) == merged
    if lse is not None:
        assert (lse - scores.logsumexp(-1)).abs().max() < 1e-5


def test_prompts_by_sdpa() -> None:
    """The last entry of the table serves any device; its log-sum-exp is what the merge needs."""
    asked = Asked(torch.device("cpu"), torch.float32, 64, merged=True)
    assert [c.why_not(asked) is None for c in prompts.CHOICES] == [False, False, False, True]
    unmerged = replace(asked, merged=False)
    assert [c.why_not(unmerged) is None for c in prompts.CHOICES] == [True, False, False, True]
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(9, h, 64, generator=rng) for h in (4, 2, 2))
    lengths = (5, 0, 3)
    start = torch.tensor([0, 5, 5, 8])
    out, lse = prompts.prompts_for(asked).causal(query, key, value, start, lengths, 0.3)
    assert out.shape == (8, 4, 64)
    for first, last in ((0, 5), (5, 8)):
        for t in range(first, last):
            k, v = (x[first : t + 1].repeat_interleave(2, 1).double() for x in (key, value))
            scores = 0.3 * torch.einsum("hd,thd->ht", query[t].double(), k)
            assert (lse[t] - scores.logsumexp(-1)).abs().max() < 1e-5
            assert (out[t] - torch.einsum("ht,thd->hd", scores.softmax(-1), v)).abs().max() < 1e-5

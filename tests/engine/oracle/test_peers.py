"""Other people's methods are served: every token is the one that their reference chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import traces

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from vllm_kvq.eval.peers import PEERS
from vllm_kvq.eval.peers.int4_token import signed_hadamard
from vllm_kvq.formats import FORMATS

pytestmark = pytest.mark.engine
N = 64
FIRST = "kvarn_k4v2"
"""Rotated, packed by pages, with sinks; it and the rest are served by the same kernels."""


SERVED = [name for name in PEERS if not FORMATS[name].keys.calibrated]


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(n, marks=pytest.mark.wide) for n in SERVED if n != FIRST)])
def test_every_token_is_the_references(name: str, run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    n = FORMATS[name].settings().N or N
    # the model has two layers, and TurboQuant would pack none of them
    options = {"skip_layers": [-1]} if FORMATS[name].settings().skip_layers else {}
    todo = list(traces.prefixes(n))
    engine = {"additional_config": {"kvq": options}, "block_size": n, "max_num_batched_tokens": 200, "max_num_seqs": 16}
    got = run(todo, kv_cache_dtype=name, **engine)
    verdict = judge(ReplayModel(str(model), name, n, **options), todo, got)
    assert not verdict.mismatches
    assert verdict.tokens > 250
    # KVarN's sinks fill more of its small pages than the prefix has: no hit is taken
    assert verdict.hits >= (0 if n == FORMATS[name].settings().S else 2)
    assert verdict.ties <= 0.02 * verdict.tokens


@pytest.mark.parametrize("d", [64, 96, 128])
def test_int4_token_rotates_as_vllm_does(d: int) -> None:
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    x = torch.randn(5, 2, d)
    ours = x @ signed_hadamard(d) * (d & -d) ** 0.5
    assert torch.allclose(single_rht(x), ours, atol=1e-4)

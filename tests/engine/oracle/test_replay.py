"""Lossy formats: every greedy token is the one that our reference chooses, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import traces
from one_each import KINDS

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict
from vllm_kvq.formats.table import suite

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("runner")]
FIXED_POINT = [(name, 1e-2 if name == "qjl3" else 1e-3) for name in KINDS]
"""With the error that their C++ kernels declare (QJL: 8-bit queries)."""
EVERY_RUN = [name for name in suite("methods") if name not in dict(FIXED_POINT)]
N = 64
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 throughout, so that only rounding separates the engine from the reference."""
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")


def replayed(
    model: Path, name: str, todo: list[Trace], got: list[Result], num_spec: int = 0, **options: Any
) -> Verdict:
    return judge(ReplayModel(str(model), name, N, num_spec, **options), todo, got)


@pytest.mark.parametrize(
    "name", [*EVERY_RUN, *(pytest.param(n, marks=pytest.mark.wide) for n in suite("public") if n not in EVERY_RUN)]
)
def test_every_token_is_the_references(name: str, run: Any, model: Path) -> None:
    """Small chunks, prefix hits and a decode over several pages."""
    todo = [traces.lengths(N, 20), *traces.prefixes(N), traces.long_decode(N)]
    got = run(todo, kv_cache_dtype=name, block_size=N, max_num_batched_tokens=200, max_num_seqs=16)
    total = replayed(model, name, todo, got)
    assert not total.mismatches
    assert total.tokens > 700
    # a hit stops before a request's newest W tokens, so wider windows have fewer hits
    assert total.hits >= 2
    assert total.ties <= 0.02 * total.tokens


# blocks that admit several requests with their sidecars and then run out while they grow
@pytest.mark.parametrize(
    ("name", "blocks"),
    [("squat2", 68), *(pytest.param(*case, marks=pytest.mark.wide) for case in (("polar4", 206), ("innerq2", 214)))],
)
def test_speculation_and_preemption(name: str, blocks: int, run: Any, model: Path) -> None:
    todo = [traces.repeats(N), traces.crowd(N)]
    got = run(todo, kv_cache_dtype=name, block_size=N, num_gpu_blocks_override=blocks, speculative_config=NGRAM)
    total = replayed(model, name, todo, got, num_spec=3)
    assert not total.mismatches
    assert total.rejected > 0
    assert total.preemptions > 0


def test_options_reach_the_kernels(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of every kind; and the control: a reference with other options disagrees, also if it computes the logits
    of a few tokens at a time."""
    todo = [traces.lengths(N, 20)]
    options = {"W": 64, "S": 20, "r": 3, "lam": 1e-2, "g": 16, "value_bits": 4, "group": 64}
    got = run(todo, kv_cache_dtype="squat2", block_size=N, additional_config={"kvq": options})
    assert not replayed(model, "squat2", todo, got, **options).mismatches
    assert (wrong := replayed(model, "squat2", todo, got, **{**options, "W": 32}).mismatches)
    assert replayed(model, "squat2", todo, got, **{**options, "r": 4}).mismatches
    monkeypatch.setattr("proof.oracle.judge.LOGITS", 33 * 512)
    assert replayed(model, "squat2", todo, got, **{**options, "W": 32}).mismatches == wrong


@pytest.mark.wide
def test_options_that_make_another_codec(run: Any, model: Path) -> None:
    """All of them at once; and the control: a reference without one of them disagrees."""
    todo = [traces.lengths(N, 20)]
    fitted = {"key_scales": "fitted", "value_scales": "fitted"}
    options = {**fitted, "value_rotation": "hadamard", "group": 64}
    got = run(todo, kv_cache_dtype="kivi2", block_size=N, additional_config={"kvq": options})
    assert not replayed(model, "kivi2", todo, got, **options).mismatches
    for left_out in (*fitted, "value_rotation"):
        fewer = {name: x for name, x in options.items() if name != left_out}
        assert replayed(model, "kivi2", todo, got, **fewer).mismatches, left_out


@pytest.mark.parametrize(("name", "error"), FIXED_POINT)
def test_fixed_point_kernels(name: str, error: float, run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels: the reference's tokens, up to the error that they declare."""
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "auto")
    todo = [traces.lengths(N, 20), *traces.prefixes(N)]
    got = run(todo, kv_cache_dtype=name, block_size=N)
    total = replayed(model, name, todo, got, kernel_error=error)
    assert not total.mismatches
    assert total.ties <= 0.02 * total.tokens

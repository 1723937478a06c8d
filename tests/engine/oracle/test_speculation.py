"""Drafts with a cache of their own: whatever they propose, the tokens are plain vLLM's, or the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import traces
from drafts import mtp_model

from proof.models.draft import METHODS, random_draft
from proof.oracle.compare import compare_all
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("runner")]
N, DRAFTS = 32, 3
LOSSLESS: dict[str, Any] = {
    "kv_cache_dtype": "lossless",
    "block_size": N,
    "additional_config": {"kvq": {"W": 32, "S": 4}},
    # several chunks per prompt, and a pool that runs out
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "max_model_len": 512,
}
BLOCKS = 60
"""They admit several requests and then run out."""
OFTEN = "eagle3"
"""Its drafts are made from several layers' hidden states, and its cache has another layer than the other methods'."""


@pytest.fixture(scope="module")
def drafts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {method: random_draft(folder / method, model, method=method) for method in METHODS}


def speculative(method: str, draft: Path) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": str(draft), "num_speculative_tokens": DRAFTS}}


def accepted_and_rejected(results: list[Any], tokens: int) -> tuple[int, int]:
    drafted = sum(len(c.drafts) for r in results for step in r.steps for c in step)
    chunks = sum(1 for r in results for step in r.steps for c in step if c.drafts)
    # a chunk with drafts gives one token and the drafts that were right
    accepted = tokens - chunks
    return accepted, drafted - accepted


@pytest.mark.parametrize("method", [m if m == OFTEN else pytest.param(m, marks=pytest.mark.wide) for m in METHODS])
def test_lossless_equals_plain_vllm(method: str, run: Any, plain: Any, drafts: dict[str, Path]) -> None:
    todo = traces.all_traces(N)
    few = {"num_gpu_blocks_override": BLOCKS}
    got = run(todo, **LOSSLESS, **few, **speculative(method, drafts[method]))
    total = compare_all(todo, plain[N], got)
    assert not total.mismatches
    assert total.hits > 0
    assert total.preemptions > 0
    accepted, rejected = accepted_and_rejected(got, total.tokens)
    assert rejected > 300
    assert accepted > (0 if method == "eagle3" else 600)


def test_mtp_equals_plain_vllm(run: Any, tmp_path: Path) -> None:
    todo, model = traces.all_traces(N), mtp_model(tmp_path / "ernie")
    expected = run(todo, model_path=model, kv_cache_dtype="auto", block_size=N, skip_tokenizer_init=True)
    mtp = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    few = {"num_gpu_blocks_override": BLOCKS, "skip_tokenizer_init": True}
    got = run(todo, model_path=model, **LOSSLESS, **few, **mtp)
    total = compare_all(todo, expected, got)
    assert not total.mismatches
    assert total.hits > 0
    assert total.preemptions > 0
    assert accepted_and_rejected(got, total.tokens)[1] > 300


@pytest.mark.parametrize(
    ("name", "method", "blocks"),
    [("squat2", "draft_model", 62), pytest.param("innerq2", "eagle", 90, marks=pytest.mark.wide)],
)
def test_lossy_formats_equal_the_reference(
    name: str, method: str, blocks: int, run: Any, model: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    todo = [traces.repeats(2 * N), traces.crowd(2 * N)]
    got = run(
        todo,
        kv_cache_dtype=name,
        block_size=N,
        additional_config={"kvq": {"W": 32, "S": 4}},
        num_gpu_blocks_override=blocks,
        **speculative(method, drafts[method]),
    )
    total = judge(ReplayModel(str(model), name, N, DRAFTS, W=32, S=4), todo, got)
    assert not total.mismatches
    assert total.rejected > 100
    assert total.preemptions > 0

"""Tiny checkpoints of other architectures are evaluated, one with layers that stay in 16 bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plans import evaluate, plan

from proof.models import named
from proof.models.architecture import VOCAB
from vllm_kvq.bench.tokenizer import made_up_tokenizer
from vllm_kvq.eval.result import DECODING, TEACHER_FORCED

sys.path.append(str(Path(__file__).parents[1] / "models"))
from checkpoints import write_model

pytestmark = [pytest.mark.engine, pytest.mark.wide]


@pytest.mark.parametrize(("name", "bits"), [("Qwen3", (7, 9)), ("Gemma-3", (9, 16))])
def test_it_is_evaluated(name: str, bits: tuple[float, float], tmp_path: Path) -> None:
    """Bits at 160 tokens, in 2 blocks of 128: Gemma-3's include layers with sliding windows, in 16 bits."""
    arch = named(name)
    model = write_model(arch, tmp_path / "model")
    made_up_tokenizer(VOCAB).save(str(model / "tokenizer.json"))
    results = evaluate(tmp_path / "cache", plan(model, "squat2"))
    for task in ("recall", "text", "all"):
        for regime in (TEACHER_FORCED, DECODING):
            (row,) = (r for r in results.rows if (r.format, r.task, r.regime) == ("squat2", task, regime))
            assert row.problem is None
            assert row.metrics["kl"].value > 0
            assert row.bits is not None
            assert bits[0] < row.bits < bits[1]

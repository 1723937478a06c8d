"""Tiny checkpoints of other architectures are evaluated, one of them with layers that are not packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from plans import evaluate, plan

from proof.models import named
from proof.models.architecture import VOCAB
from proof.models.checkpoints import write_model
from vllm_kvq.bench.models.tokenizer import made_up_tokenizer
from vllm_kvq.eval.results.result import DECODING, TEACHER_FORCED
from vllm_kvq.formats import FORMATS, Geometry
from vllm_kvq.kernels.slots import SlotGeometry

pytestmark = [pytest.mark.engine, pytest.mark.wide]


def packed_bits(tokens: int) -> float:
    """Bits of a packed layer, two KV heads of 64 in float32: whole blocks of 128 tokens, for sidecar and sinks, too."""
    fmt = FORMATS["squat2"].bind(Geometry(64, 128, torch.float32))
    slots = SlotGeometry.of(fmt, 2, 0)
    blocks = -(-tokens // fmt.N) + slots.sidecar_blocks + slots.sink_blocks
    return blocks * fmt.record_bytes * 8 / (tokens * 2 * 64)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma-3"])
def test_it_is_evaluated(name: str, tmp_path: Path) -> None:
    arch = named(name)
    model = write_model(arch, tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made_up_tokenizer(VOCAB)).save_pretrained(model)
    results = evaluate(tmp_path / "cache", plan(model, "squat2"))
    for task in ("recall", "text", "all"):
        for regime in (TEACHER_FORCED, DECODING):
            (row,) = (r for r in results.rows if (r.format, r.task, r.regime) == ("squat2", task, regime))
            assert row.problem is None
            assert row.metrics["kl"].value > 0
            # Gemma-3 has layers with sliding windows, whose 16-bit blocks are padded to the packed ones
            assert row.bits == packed_bits(160) if name == "Qwen3" else row.bits > packed_bits(160)

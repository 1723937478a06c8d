"""Bits per number in a packed page: those that `vllm-kvq formats` prints, whatever else a request holds."""

from __future__ import annotations

import pytest

from vllm_kvq.eval.choice import choices

pytest.importorskip("vllm")

from vllm_kvq.eval.bits import page_bits


@pytest.mark.parametrize(
    ("text", "head_size", "dtype", "bits"),
    [
        ("auto", 64, "bfloat16", 16),
        ("auto", 64, "float32", 32),
        ("fp8", 64, "bfloat16", 8),
        ("kivi2", 64, "bfloat16", 3.0625),
        ("kivi2:N=64", 64, "bfloat16", 3.125),
        ("kivi2:W=256,S=64", 128, "bfloat16", 3.03125),
        # the state of a request and its sinks are in no page
        ("squat2", 128, "bfloat16", 2.90625),
    ],
)
def test_pages(text: str, head_size: int, dtype: str, bits: float) -> None:
    (choice,) = choices(text)
    assert page_bits(choice, head_size, dtype) == bits

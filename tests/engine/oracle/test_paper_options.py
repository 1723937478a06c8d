"""The papers' variants of SQuat and InnerQ are served: every token is the one that their reference chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import traces

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel

pytestmark = pytest.mark.engine
N = 32
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("squat2", {"r": 40, "floor": 0, "W": 0}),
    ("innerq2", {"quant_mode": "asymmetric", "key_norm": "none", "W": 32, "S": 0}),
    ("squat2", {"r": 1, "lam": 0.1, "g": 16, "floor": 0}),
    ("innerq2", {"quant_mode": "symmetric", "W": 0, "S": 8}),
    ("innerq2", {"key_norm": "none", "S": 8}),
]
EVERY_RUN = 2
"""One of each kind; the marker `wide` has the rest."""


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*v, marks=[] if i < EVERY_RUN else pytest.mark.wide) for i, v in enumerate(VARIANTS)],
)
def test_every_token_is_the_references(name: str, options: dict[str, Any], run: Any, model: Path) -> None:
    todo = list(traces.prefixes(N))
    engine = {"max_num_batched_tokens": 100, "max_num_seqs": 16}
    got = run(todo, kv_cache_dtype=name, block_size=N, additional_config={"kvq": options}, **engine)
    verdict = judge(ReplayModel(str(model), name, N, kernel_error=1e-3, **options), todo, got)
    assert not verdict.mismatches
    assert verdict.tokens > 200
    assert verdict.hits >= 2
    assert verdict.ties <= 0.05 * verdict.tokens

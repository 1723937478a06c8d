"""Small evaluations of a random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_kvq.eval.choice import choices
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.results.result import USUAL, Results
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.harness import Run
from vllm_kvq.eval.run.plan import Plan
from vllm_kvq.eval.run.rows import rows
from vllm_kvq.eval.run.store import Store


def plan(model: Path, formats: str, **more: Any) -> Plan:
    """Without fp8: one engine fewer."""
    named = choices(formats)
    chosen = (REFERENCE, *(choice for choice in named if choice != REFERENCE))
    small: dict[str, Any] = {
        **{"tasks": ("recall", "text"), "contexts": (160,), "count": 3, "seed": 0, "regimes": USUAL, "chunk": 32},
        **{"top": None, "answers": 2, "longest": 24, "control": REFERENCE in named},
    }
    return Plan(model=Model.of(str(model), "float32"), choices=chosen, **{**small, **more})


def evaluate(folder: Path, todo: Plan) -> Results:
    run = Run(todo, Store(folder), lambda text, more: None)
    run.go()
    return Results(rows(run))

"""The reading regime compared with the engine: a prompt read at once, then the text's own tokens, forced one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from forked_commands import warm_engines
from plans import plan

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.demo import DEMO
from vllm_kvq.eval.engine.engines import Engine
from vllm_kvq.eval.engine.jobs import Generate
from vllm_kvq.eval.engine.logprobs import Logprobs, divergence
from vllm_kvq.eval.results.result import DECODING, READING
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.harness import Run
from vllm_kvq.eval.run.plan import Plan
from vllm_kvq.eval.run.store import Store

FORMATS = ("squat2:W=64,S=4", "kivi2,innerq2")
READERS = 160


def forced(todo: Plan, choice: Choice) -> list[Logprobs]:
    """What the engine makes of each text's last tokens, decode step by decode step."""
    found = []
    with Engine(todo.engine(choice, DECODING)) as engine:
        for item in todo.sequences:
            first = len(item.tokens) - 1 - READERS
            prompt, rest = item.tokens[:first], item.tokens[first:]
            (said,) = engine.generate(Generate((prompt,), (len(rest),), (rest,)))
            # the first is the prompt's own, from its exact keys and values
            found.append(said.after(1))
    return found


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("formats", [FORMATS[0], *(pytest.param(f, marks=pytest.mark.wide) for f in FORMATS[1:])])
def test_a_decode_step_reads_the_same(formats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_engines(monkeypatch)
    wanted = {"tasks": ("text",), "contexts": (480,), "count": 2, "regimes": (READING,), "readers": READERS}
    todo = plan(DEMO, formats, **wanted)
    run = Run(todo, Store(tmp_path), lambda text, more: None)
    run.go()
    plain = forced(todo, REFERENCE)
    for choice in todo.choices[1:]:
        said = forced(todo, choice)
        engines = [divergence(p, q).mean() for p, q in zip(plain, said, strict=True)]
        ours = [run.figures(choice, item, READING) for item in todo.sequences]
        for figures, p in zip(ours, plain, strict=True):
            assert figures is not None
            assert np.array_equal(figures["token"], p.token)
            assert figures["chosen_plain"] == pytest.approx(p.chosen, abs=1e-3)
        mean = np.mean([figures["kl"].mean() for figures in ours if figures is not None])
        assert mean > 1e-4
        assert mean == pytest.approx(np.mean(engines), rel=0.02), choice.label

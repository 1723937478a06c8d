"""Random engines and traffic of the fuzzer over models that mix kinds of layers, and the faults that it has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from proof.fuzz.attempt import Runner
from proof.fuzz.case import MODEL, Setup
from proof.fuzz.draw import Drawer, draw_setup
from proof.oracle.verdict import Verdict
from vllm_kvq.bench.random_model import random_model

pytestmark = pytest.mark.engine
Judge = Callable[..., Verdict]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """judged(setup, seed, how many traces, prepare) -> verdict."""
    model = random_model(tmp_path_factory.mktemp("traffic") / "model", **MODEL)

    def judge(setup: Setup, seed: str, count: int = 2, prepare: Any = None) -> Verdict:
        drawer, runner = Drawer(Random(f"{seed}/traces"), setup), Runner(str(model), setup, prepare)
        try:
            return runner.judge([drawer.trace(f"t{i}", reset=i == 0) for i in range(count)])
        finally:
            runner.close()

    return judge


BY_DEFAULT = (("Llama 4", "squat2"), ("Granite 4", "lossless"), ("gpt-oss", "innerq2"))
CASES = [
    (name, form)
    for name in ("Gemma-3", "Command R7B", "gpt-oss", "Llama 4", "Granite 4", "Nemotron-H", "Falcon-H1")
    for form in ("lossless", "squat2", "innerq2", "qjl3", "polar4", "kitty2")
]


@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(*c, marks=() if c in BY_DEFAULT else pytest.mark.wide) for c in CASES]
)
def test_random_traffic(name: str, form: str, judged: Judge) -> None:
    rng = Random(f"{name}/{form}")
    setup = replace(draw_setup(rng, form, "V1", name), prefix_caching=True, far=False)
    total = judged(setup, f"{name}/{form}")
    assert not total.mismatches
    assert total.tokens > 200
    assert total.ties <= 0.05 * total.tokens

"""Random engines and traffic, as the fuzzer draws them, over models that mix kinds of layers: plain vLLM's tokens."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from lab import Lab

from proof.fuzz.draw import Drawer, draw_setup
from proof.models import named
from proof.oracle.compare import compare_all
from proof.oracle.trace import Trace

pytestmark = pytest.mark.engine
N = 32
LEAST = {
    "Gemma-3": 150,
    "Gemma-3n": 110,
    "Command R7B": 110,
    "gpt-oss": 100,
    "Llama 4": 110,
    "Granite 4": 45,
    "Nemotron-H": 40,
}
"""About as many blocks as a request of the maximum length takes: with few more, requests are preempted."""
BY_DEFAULT = (("Llama 4", 1), ("Granite 4", 2))


def traffic(rng: Random, setup: Any) -> list[Trace]:
    """Without stop strings, for which these models have no tokenizer, and greedy: rounding may turn a sample."""
    drawer = Drawer(rng, setup)
    drawn = [drawer.trace(f"t{i}", reset=i == 0) for i in range(3)]
    return [Trace(tuple(replace(r, stop=(), n=1, temperature=0.0) for r in t.requests), t.reset) for t in drawn]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if (name, seed) in BY_DEFAULT else pytest.mark.wide)
        for name in LEAST
        for seed in (1, 2)
    ],
)
def test_random_traffic(name: str, seed: int, lab: Lab) -> None:
    rng, arch = Random(f"{name}/{seed}"), named(name)
    drawn = draw_setup(rng, "lossless", "V1")
    options = {**drawn.options, "S": min(N, drawn.options["S"])}
    setup = replace(drawn, block_size=N, options=options, prefix_caching=True, far=False, draft_model=False)
    if arch.hybrid:
        setup = replace(setup, drafts=0)
    todo, least = traffic(rng, setup), LEAST[name]
    shared = {
        "max_model_len": 640,
        "prefix_cache_retention_interval": rng.choice((0, None)),
        "skip_tokenizer_init": True,
    }
    plain = {**setup.plain().arguments(), **shared, "num_gpu_blocks_override": 30 * least}
    plain.pop("speculative_config", None)
    ours = {**setup.arguments(), **shared, "num_gpu_blocks_override": int(rng.choice((1.1, 1.6, 3)) * least)}
    del ours["pool"]
    total = compare_all(todo, lab.run(arch, todo, **plain), lab.run(arch, todo, **ours))
    assert not total.mismatches
    assert total.tokens > 200

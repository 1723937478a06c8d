"""Mixed kinds of layers under vLLM's V2 model runner, which it takes on a GPU: the tokens of its runner for CPUs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from lab import Lab, smallest_pages
from one_each import KINDS as FORMS
from test_hits import ENGINE, lossless, words

from proof.models import SERVED, named
from proof.oracle.compare import compare_all
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Request, Trace

pytestmark = [pytest.mark.engine, pytest.mark.wide]


def few() -> list[Trace]:
    """A prompt longer than a window, in chunks; then a hit on all of it together with another request."""
    rng = random.Random(9)
    cold = words(rng, 100)
    return [
        Trace((Request("cold", cold, 6),)),
        Trace((Request("turn", cold + words(rng, 20), 6), Request("other", words(rng, 40), 6, arrival=1))),
    ]


@pytest.mark.parametrize(("name", "block"), [("Gemma-3", 32), ("Gemma-3", 64), ("Granite 4", 32)])
def test_tokens_are_plain_vllms(name: str, block: int, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows have pages of 32 tokens, the others of `block`."""
    arch, todo = named(name), few()
    engine: dict[str, Any] = {**ENGINE, "block_size": block, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    expected = lab.run(arch, todo, kv_cache_dtype="auto", **engine)
    monkeypatch.setenv(RUNNER, "1")
    got = lab.run(arch, todo, before=smallest_pages, **lossless(), **engine)
    total = compare_all(todo, expected, got)
    assert not total.mismatches
    assert total.tokens == 18
    assert [r.cached for r in got] == [r.cached for r in expected]
    assert total.hits == 1


KINDS = [a.name for a in SERVED if (a.windows or a.hybrid) and a.replay and not a.vision]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_the_references(name: str, form: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, and a hit on it, by the kernels that serve on a CPU."""
    monkeypatch.setenv(RUNNER, "1")
    arch, todo = named(name), few()
    options: dict[str, Any] = {"W": 32, "S": 4, "recompute": 0}
    if form == "polar4" and (arch.polar or arch.rope != "half"):
        options["pairing"] = arch.rope
    if form == "qjl3" and arch.head_size > 256:
        options["outliers"] = 0
    engine: dict[str, Any] = {**ENGINE, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    got = lab.run(arch, todo, kv_cache_dtype=form, additional_config={"kvq": options}, **engine)
    error = 1e-2 if form == "qjl3" else 1e-3
    total = judge(ReplayModel(str(lab.model(arch)), form, 32, kernel_error=error, **options), todo, got)
    assert not total.mismatches
    assert (total.tokens, total.hits) == (18, 1)
    assert total.ties <= 1

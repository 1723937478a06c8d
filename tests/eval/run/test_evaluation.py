"""The harness judged: equal caches show no difference, a broken codec is caught, two runs agree."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import broken
import pytest
from models_on_disk import SMALL
from plans import evaluate, plan

from vllm_kvq.eval.engine.engines import EngineFailed
from vllm_kvq.eval.results.result import DECODING, HITS, TEACHER_FORCED, Estimate, Results, Row
from vllm_kvq.eval.run import store
from vllm_kvq.formats import table

pytestmark = pytest.mark.engine
SHAPE = {**SMALL, "logit_scale": 3.0}
"""As decisive as a trained model rather than as the other tests' models, whose logits are far apart."""
BROKEN = ("scaled", "swapped", "late")
NOISE = 1e-5
"""Nats: what float32 leaves between two ways to add up the same numbers; measured: below 2e-6."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    broken.install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        table.third_parties.cache_clear()
        yield
    table.third_parties.cache_clear()


@pytest.fixture(scope="module")
def results(model: Path, packages: None, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Plain against itself, a lossless format that PyTorch serves, and its broken relatives."""
    folder = tmp_path_factory.mktemp("cache")
    todo = plan(model, f"auto,whole,squat2,{','.join(BROKEN)}", regimes=(TEACHER_FORCED,))
    forced = evaluate(folder, todo)
    generated = evaluate(folder, plan(model, "auto,lossless,scaled", regimes=(DECODING,)))
    return Results(forced.rows + generated.rows)


def row(results: Results, name: str, task: str, regime: str) -> Row:
    (found,) = (r for r in results.rows if (r.format, r.task, r.regime) == (name, task, regime))
    assert found.problem is None
    return found


@pytest.mark.parametrize("regime", [TEACHER_FORCED, DECODING])
@pytest.mark.parametrize("task", ["recall", "text"])
def test_plain_against_plain_is_nothing_at_all(results: Results, task: str, regime: str) -> None:
    """Two separate engines, not one run compared with itself."""
    metrics = row(results, "auto", task, regime).metrics
    for name in ("kl", "kl_median", "dp_mean", "dp_rms"):
        assert metrics[name] == Estimate(0, 0, 0), name
    assert metrics["top1"] == Estimate(1, 1, 1)
    if regime == TEACHER_FORCED:
        assert metrics["perplexity"] == metrics["perplexity_bf16"]


@pytest.mark.parametrize(("name", "regime"), [("whole", TEACHER_FORCED), ("lossless", DECODING)])
@pytest.mark.parametrize("task", ["recall", "text"])
def test_lossless_is_plain_but_for_rounding(results: Results, name: str, task: str, regime: str) -> None:
    found, plain = row(results, name, task, regime), row(results, "auto", task, regime)
    assert found.metrics["kl"].high < NOISE
    if regime == TEACHER_FORCED:
        # not only on average
        assert 0 <= max(token.kl for token in found.hurt) < NOISE
    assert found.metrics["top1"] == Estimate(1, 1, 1)
    if regime == DECODING:
        assert found.metrics["agreement"] == plain.metrics["agreement"]
        assert found.metrics["agreement"].value > 1


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("task", ["recall", "text"])
def test_a_broken_codec_is_caught(results: Results, name: str, task: str) -> None:
    """Its confidence interval excludes the right codec's."""
    found, right = row(results, name, task, TEACHER_FORCED), row(results, "whole", task, TEACHER_FORCED)
    assert found.metrics["kl"].low > 100 * right.metrics["kl"].high
    assert found.metrics["top1"].high < 1


@pytest.mark.parametrize("task", ["recall", "text"])
def test_a_broken_codec_is_caught_while_it_generates(results: Results, task: str) -> None:
    found, right = (row(results, name, task, DECODING) for name in ("scaled", "lossless"))
    assert found.metrics["kl"].low > 100 * right.metrics["kl"].high
    if task == "text":
        assert found.metrics["agreement"].high < right.metrics["agreement"].low


def test_hits_are_measured(model: Path, tmp_path: Path) -> None:
    """Answers to prompts that are found in the prefix cache: `lossless` loses nothing; what `kivi2` loses depends on
    how much of a prompt is computed again, though a model of random weights does not lose less by it."""
    wanted = {"tasks": ("text",), "regimes": (HITS,), "contexts": (1024,)}
    formats = "lossless,kivi2:recompute=256,kivi2:recompute=0"
    found = {row.label: row.metrics["kl"] for row in evaluate(tmp_path, plan(model, formats, **wanted)).rows}
    assert found["lossless"].high < NOISE
    assert min(found[f"kivi2:recompute={n}"].low for n in (0, 256)) > 1000 * NOISE
    assert found["kivi2:recompute=256"] != found["kivi2:recompute=0"]


def test_a_prompt_that_is_never_found_ends_it(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="too short to be found in the prefix cache; ask for a longer --context"):
        evaluate(tmp_path, plan(model, "squat2", regimes=(HITS,)))


def test_bits_are_those_of_what_is_kept(results: Results) -> None:
    """float32, bit for bit, in 2 blocks of 128 tokens and those of a sidecar of 65 slots."""
    assert row(results, "auto", "text", TEACHER_FORCED).bits == 32
    lossless = row(results, "whole", "text", TEACHER_FORCED)
    assert lossless.bits is not None
    assert lossless.bits > 32 * (256 + 65) / 160


def test_two_runs_agree(results: Results, model: Path, tmp_path: Path) -> None:
    """In a separate cache: nothing is taken from the other run."""
    again = evaluate(tmp_path, plan(model, "squat2", regimes=(TEACHER_FORCED,)))
    for task in ("recall", "text"):
        once = row(results, "squat2", task, TEACHER_FORCED)
        assert row(again, "squat2", task, TEACHER_FORCED) == once
        assert once.metrics["kl"].low > NOISE


def test_the_cache_knows_the_sources_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including those that declare no format's codec."""
    peers = tmp_path / "eval" / "peers"
    shutil.copytree(store.PACKAGE / "eval" / "peers", peers)
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    before = store.sources.__wrapped__()
    (peers / "coding.py").write_text("")
    assert store.sources.__wrapped__() != before


def test_the_cache_knows_its_formats_sources(packages: None) -> None:
    assert len({store.format_sources(name) for name in ("whole", "squat2", "auto")}) == 3

"""vLLM's V2 model runner, which it uses on a GPU, gives the same tokens as its runner for CPUs.

With `-m wide` all tests of traces, drafts, poison and lifecycles run under it (the fixture `runner`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import poison
import pytest
import traces
from engine_arguments import kvq
from models_on_disk import SMALL, Written
from test_lifecycle import reload
from test_poison import told

from proof.models.draft import random_draft
from proof.oracle.compare import compare_all
from proof.oracle.engines.forked import EngineProcess
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Result, Trace
from vllm_kvq.integration.patches.served import warmup

pytestmark = pytest.mark.engine
N, DRAFTS = 32, 2
TRACES = traces.few(N)
RESET = [replace(TRACES[0], reset=True), TRACES[1]]
ENGINE: dict[str, Any] = {"block_size": N, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
ASYNCHRONOUS = {"async_scheduling": True}


@pytest.fixture(autouse=True)
def v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNER, "1")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Result]:
    """Plain vLLM's answers, by its runner for CPUs."""
    with EngineProcess(str(model), ENGINE, {RUNNER: "0"}) as process:
        return [process.run(trace) for trace in TRACES]


def kind(engine: Any) -> tuple[str, bool]:
    """Which runner serves, and whether steps are scheduled before the last one's tokens are known."""
    core = engine.engine.engine_core.engine_core
    return type(core.model_executor.driver_worker.worker.model_runner).__module__, core.batch_queue is not None


def ngram(method: str = "ngram") -> dict[str, Any]:
    lookup = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    return {"speculative_config": {"method": method, "num_speculative_tokens": DRAFTS, **lookup}}


LOSSLESS: dict[str, dict[str, Any]] = {
    "drafts from ngrams": ngram(),
    "asynchronous, drafts from ngrams": ASYNCHRONOUS | ngram("ngram_gpu"),
    "asynchronous, a draft model": ASYNCHRONOUS | {"draft": "draft_model"},
    "compiled": {"enforce_eager": False},
}
LONG = ("compiled",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.wide) if n in LONG else n for n in LOSSLESS])
def test_lossless_equals_plain_vllm(name: str, model: Path, expected: list[Result], tmp_path: Path) -> None:
    arguments = {**ENGINE, "kv_cache_dtype": "lossless", **kvq(W=32, S=4), **LOSSLESS[name]}
    if method := arguments.pop("draft", None):
        draft = random_draft(tmp_path / "draft", model, method=method)
        how = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFTS}
        arguments["speculative_config"] = how
    with EngineProcess(str(model), arguments, {}) as process:
        assert process.call(kind) == ("vllm.v1.worker.cpu.model_runner", "asynchronous" in name)
        got = [process.run(trace) for trace in TRACES]
    total = compare_all(TRACES, expected, got)
    assert not total.mismatches
    assert total.tokens == 28
    assert total.hits > 0
    assert any(c.drafts for r in got for step in r.steps for c in step) == ("draft" in name)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.wide), True])
def test_tokens_are_the_references(asynchronous: bool, model: Path) -> None:
    """The C++ kernels; three growing requests preempt each other."""
    growing = tuple(replace(request, max_tokens=N) for request in traces.crowd(N).requests[:3])
    todo = [*TRACES, Trace(growing)]
    arguments = {**ENGINE, "kv_cache_dtype": "squat2", **ngram("ngram_gpu"), "num_gpu_blocks_override": 53}
    with EngineProcess(str(model), {**arguments, "async_scheduling": asynchronous}, {}) as process:
        got = [process.run(trace) for trace in todo]
    total = judge(ReplayModel(str(model), "squat2", N, DRAFTS, kernel_error=1e-3), todo, got)
    assert not total.mismatches
    assert min(total.hits, total.rejected, total.preemptions) > 0
    assert total.ties <= 0.05 * total.tokens


def test_the_gpu_path(run: Any, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layer: each takes as long as everything that the runner itself does."""
    model = written(**SMALL | {"layers": 1})
    monkeypatch.setenv("VLLM_KVQ_GPU_PATH", "1")
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    got = run(TRACES, model, kv_cache_dtype="squat2", **ENGINE, **ngram("ngram_gpu"), **ASYNCHRONOUS)
    total = judge(ReplayModel(str(model), "squat2", N, DRAFTS, kernel_error=1e-3), TRACES, got)
    assert not total.mismatches
    assert total.tokens == 28
    assert min(total.hits, total.rejected) > 0
    assert total.ties <= 2


def warm_up(engine: Any) -> None:
    """What vLLM's worker for GPUs does before the first request, and the one for CPUs from 0.33 on.

    It makes requests, and reserves for them what it thinks they need.
    """
    assert warmup.WARMED_UP.problem() is None
    assert warmup.WARMED_UP.in_effect()
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    worker = engine.engine.engine_core.engine_core.model_executor.driver_worker.worker
    for _ in range(2):  # the second time with the first one's blocks, as with drafts
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


@pytest.mark.parametrize("gpu_path", ["0", pytest.param("1", marks=pytest.mark.wide)])
def test_warm_up(gpu_path: str, model: Path) -> None:
    path = {"VLLM_KVQ_GPU_PATH": gpu_path, "VLLM_KVQ_KERNELS": "torch"} if gpu_path == "1" else {}
    with EngineProcess(str(model), {**ENGINE, "kv_cache_dtype": "squat2", **ngram("ngram_gpu")}, path) as process:
        process.call(warm_up)
        got = [process.run(trace) for trace in TRACES]
    total = judge(ReplayModel(str(model), "squat2", N, DRAFTS, kernel_error=1e-3), TRACES, got)
    assert not total.mismatches
    assert total.tokens == 28


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[EngineProcess]:
    # few blocks: poison fills all that are free, before every step
    arguments = {**ENGINE, "kv_cache_dtype": "squat2", "num_gpu_blocks_override": 80}
    with EngineProcess(str(model), arguments, {RUNNER: "1"}) as engine:
        yield engine


def answers(process: EngineProcess) -> list[Any]:
    return [process.run(trace).outputs for trace in RESET]


def test_new_weights(process: EngineProcess, model: Path, written: Written) -> None:
    other = written(**SMALL, seed=1)
    first = answers(process)
    process.call(functools.partial(reload, str(other)))
    assert answers(process) != first
    process.call(functools.partial(reload, str(model)))
    assert answers(process) == first


def test_nothing_unread_matters(process: EngineProcess) -> None:
    """Poison, as in test_poison.py, and the control that it is seen."""
    first = answers(process)
    process.call(poison.poison_freed)
    process.call(poison.poison_unread)
    assert answers(process) == first
    process.call(poison.stop_poison)
    process.call(poison.poison_too_much)
    assert told(process, RESET) not in (first, None)

"""Starts real engines, each in a separate process, and takes plain vLLM's answers as the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import traces
from models_on_disk import SMALL, Written
from one_thread import one_thread

from proof.models import named
from proof.oracle.engines.forked import EngineProcess
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.trace import Result, Trace

__all__ = ["one_thread"]

MEMORY = {"kv_cache_memory_bytes": 1 << 30}
"""For configurations that are made while other tests run: the memory of vLLM's default may not be free."""

Run = Callable[..., list[Result]]
Bare = Callable[..., Any]


@pytest.fixture(scope="session")
def run(written: Written) -> Run:
    """run(traces, **engine arguments) -> results."""

    small = written(**SMALL)

    def go(todo: list[Trace], model_path: Path = small, **engine: Any) -> list[Result]:
        with EngineProcess(str(model_path), engine, {}) as process:
            return [process.run(trace) for trace in todo]

    return go


@pytest.fixture(scope="session")
def plain(run: Run) -> dict[int, list[Result]]:
    """Plain vLLM's answers for N = 32 (greedy tokens do not depend on block sizes)."""
    todo = traces.all_traces(32)
    return {32: run(todo, kv_cache_dtype="auto", block_size=32)}


@pytest.fixture(scope="session")
def plain_samples(run: Run) -> Result:
    return run([traces.samples_and_aborts(32)], kv_cache_dtype="auto", block_size=32)[0]


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.wide)])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """vLLM's model runner in the engines that a module starts. A step of V2 is interpreted here, which takes long:
    test_v2.py has few of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNNER, "1" if request.param == "V2" else "0")
        yield request.param


@pytest.fixture
def bare(configured: Bare, monkeypatch: pytest.MonkeyPatch) -> Bare:
    """vLLM's configuration before anything of ours is written into it."""
    monkeypatch.setattr("vllm_kvq.integration.platform.apply", lambda served, vllm_config: None)
    return configured


@pytest.fixture
def configured(model: Path, tmp_path: Path) -> Bare:
    """vLLM's configuration as an engine has it."""
    from transformers.models.auto import modeling_auto as auto
    from vllm.engine.arg_utils import EngineArgs

    def make(**arguments: Any) -> Any:
        where: Path = model
        if arch := arguments.pop("model", None):
            arch = named(arch)
            config = replace(arch, numbers={**arch.numbers, **arguments.pop("numbers", {})}).build()
            config.architectures = [auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            config.save_pretrained(where := tmp_path / "model")
            arguments |= {"skip_tokenizer_init": True, "dtype": "float32"}
        if method := arguments.pop("draft", None):
            from proof.models.draft import random_draft

            draft = random_draft(tmp_path / "draft", model, method=method)
            arguments["speculative_config"] = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
        return EngineArgs(model=str(where), **{"max_model_len": 256, **MEMORY, **arguments}).create_engine_config()

    return make

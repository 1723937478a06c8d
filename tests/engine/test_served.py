"""What is served: made from the configuration alone, the same in every process, and all that is written or printed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import CASES, kvq

from vllm_kvq.bench.server import parse_capacity
from vllm_kvq.integration import report, validate
from vllm_kvq.integration.kept import Layers
from vllm_kvq.integration.served import Served, apply
from vllm_kvq.kernels.paths import Path as KernelPath

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]


def told(vllm_config: Any) -> str:
    cache, spec = vllm_config.cache_config, vllm_config.speculative_config
    return (
        f"{cache.block_size} {cache.user_specified_block_size} {cache.skip_page_size_padded} "
        f"{cache.kv_cache_dtype_skip_layers} {cache.enable_prefix_caching} {spec and spec.kv_cache_dtype}"
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_and_printed(case: str, bare: Bare) -> None:
    arguments, written, line = CASES[case]
    vllm_config = bare(**arguments)
    untouched = told(vllm_config)
    validate.check(vllm_config)
    served = Served.of(vllm_config)
    assert told(vllm_config) == untouched

    for _ in range(2):  # vLLM asks again for every copy of a configuration that it makes
        apply(served, vllm_config)
        assert told(vllm_config) == written
        validate.check(vllm_config)
    assert report.start_line(served, 1000) == line
    assert parse_capacity(line) is not None

    # a worker's copy; prefix caching is off there for whatever reason, and nothing else is known to have been written
    worker = pickle.loads(pickle.dumps(vllm_config))
    assert Served.of(worker) == Served.of(vllm_config) == served


def test_what_is_served_is_frozen_and_has_reasons(bare: Bare) -> None:
    plain, mixed = (Served.of(bare(**CASES[case][0])) for case in ("plain", "windows"))
    assert plain.prefix_caching
    assert plain.no_prefix_caching is None
    assert not plain.padded
    assert not mixed.prefix_caching
    assert mixed.no_prefix_caching == "some layers stay in 16 bits"
    assert (mixed.layers.packed, len(mixed.layers.windows), len(mixed.layers.skipped)) == (1, 5, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.max_len = 3  # type: ignore[misc]


def test_a_window_layer_that_is_skipped_counts_once(bare: Bare) -> None:
    vllm_config = bare(**CASES["windows"][0], **kvq(skip_layers=[0]))
    layers = Layers.of(vllm_config)
    assert layers.kept == ("0", "sliding_window")
    assert layers.packed + len(layers.windows) + len(layers.skipped) == layers.total
    assert 0 in layers.windows
    assert layers.skipped == frozenset()


@pytest.mark.parametrize("case", CASES)
def test_the_platform_does_all_of_it(case: str, configured: Bare) -> None:
    """Without the fixture: vLLM itself gets there, and a second configuration is not affected by a first."""
    arguments, written, _ = CASES[case]
    assert told(configured(**copy.deepcopy(arguments))) == written
    plain, expected, _ = CASES["plain"]
    assert told(configured(**copy.deepcopy(plain))) == expected


@pytest.mark.parametrize("case", CASES)
def test_prefix_caching(case: str, configured: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off beside layers in 16 bits, and then said so once; what the user has switched off stays off."""
    said: list[str] = []
    monkeypatch.setattr("vllm_kvq.integration.served.logger.warning_once", lambda text, *more: said.append(text % more))
    arguments, _, _ = CASES[case]
    beside = "skipped" in case or "two ranks" in case or case == "windows"
    assert configured(**copy.deepcopy(arguments)).cache_config.enable_prefix_caching is not beside
    sentence = "kvq: prefix caching is switched off: some layers stay in 16 bits"
    assert {*said} == ({sentence} if beside else set())
    del said[:]
    off = {**copy.deepcopy(arguments), "enable_prefix_caching": False}
    assert not configured(**off).cache_config.enable_prefix_caching
    assert not said


def test_another_dtype_is_left_alone(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256).create_engine_config()
    # the block size is vLLM's own, which is another one in 0.33
    assert told(made).partition(" ")[2] == "False None [] True None"


def test_the_line_stays_parseable() -> None:
    with pytest.raises(ValueError, match="one word"):
        KernelPath("the PyTorch kernels")


def test_what_is_said_at_start(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the pool is there; by then vLLM may have shortened the length and changed the block size."""
    arguments, _, line = CASES["plain"]
    vllm_config = bare(**{**arguments, "max_model_len": 1024})
    served = Served.of(vllm_config)
    slow = dataclasses.replace(served, path=KernelPath("PyTorch", "there is no compiler"))
    vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size = 256, 32
    said: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(report.logger, level, lambda text, *values: said.append(text % values))
    for first in (True, False):
        monkeypatch.setattr("vllm.distributed.parallel_state.is_global_first_rank", lambda first=first: first)
        report.report_start(served, vllm_config, 1000)
        report.report_start(slow, vllm_config, 1000)
    why = f"kvq: {served.format.name} is served by the slower PyTorch path: there is no compiler"
    assert said == [line, line.replace("path=C++", "path=PyTorch"), why]
    del said[:]
    monkeypatch.setattr("vllm_kvq.kernels.paths.slow", lambda fmt: f"{fmt.name} is slow here")
    monkeypatch.setattr("vllm.distributed.parallel_state.is_global_first_rank", lambda: True)
    report.report_start(Served.of(bare(**{**arguments, "max_model_len": 1024})), vllm_config, 1000)
    assert said == [line, f"kvq: {served.format.name} is slow here"]


def test_each_layer_has_its_own_page_size() -> None:
    """In a backend class of its own: two engines in one process, or a draft beside its target, don't share it."""
    from vllm_kvq.integration.sixteen import DraftBackend, DraftImpl, SixteenBitBackend, SixteenBitImpl

    def backend_after_loading(impl_class: type[SixteenBitImpl], page: int) -> Any:
        impl = object.__new__(impl_class)
        layer = SimpleNamespace(impl=impl, attn_backend=None)
        impl.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(skip_page_size_padded=page),
            compilation_config=SimpleNamespace(static_forward_context={"another": object(), "this": layer}),
            speculative_config=SimpleNamespace(method="eagle"),
        )
        impl.process_weights_after_loading(torch.float32)
        return layer.attn_backend

    made = [backend_after_loading(c, page) for c in (SixteenBitImpl, DraftImpl) for page in (4096, 8192)]
    assert [backend.page for backend in made] == [4096, 8192, 4096, 8192]
    assert [backend.__base__ for backend in made] == [SixteenBitBackend] * 2 + [DraftBackend] * 2
    assert SixteenBitBackend.page is DraftBackend.page is None
    # vLLM puts layers of one backend, by this name, into one group
    assert made[0].full_cls_name() == made[1].full_cls_name() != made[2].full_cls_name()
    with pytest.raises(RuntimeError, match="before its weights were loaded"):
        SixteenBitBackend.customize_spec(None)

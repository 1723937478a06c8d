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

from proof.models import named
from vllm_kvq.bench.server import parse_capacity
from vllm_kvq.integration import platform, report, validate
from vllm_kvq.integration.kept import Layers
from vllm_kvq.integration.served import Served, apply
from vllm_kvq.kernels.paths import Path as KernelPath

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]


def kvq(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"kvq": options}}


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": (
        {"kv_cache_dtype": "squat2"},
        "128 True None [] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=0 sidecar_bytes=37632 (per request and layer) exempt=none "
        "path=C++ capacity_tokens=51148 bf16_tokens=24500 ratio=2.09 (requests of 256 tokens)",
    ),
    "sinks": (
        {"kv_cache_dtype": "innerq2", "block_size": 64, "max_model_len": 1024},
        "64 True None [] True None",
        "kvq: format=innerq2 bits=3.750 N=64 W=96 S=32 sidecar_bytes=92160 (per request and layer) exempt=none "
        "path=C++ capacity_tokens=36534 bf16_tokens=15000 ratio=2.44 (requests of 1024 tokens)",
    ),
    "option N": (
        {"kv_cache_dtype": "qjl3", **kvq(N=64, W=64)},
        "64 True None [] True None",
        "kvq: format=qjl3 bits=3.500 N=64 W=64 S=0 sidecar_bytes=57344 (per request and layer) exempt=none "
        "path=C++ capacity_tokens=21312 bf16_tokens=14000 ratio=1.52 (requests of 256 tokens)",
    ),
    "a skipped layer": (
        {"kv_cache_dtype": "squat2", **kvq(skip_layers=[1])},
        "256 True 24832 ['1'] False None",
        "kvq: format=squat2 bits=3.031 N=256 W=32 S=0 sidecar_bytes=49664 (per request and layer) exempt=1 "
        "path=C++ capacity_tokens=23249 bf16_tokens=24250 ratio=0.96 (requests of 256 tokens)",
    ),
    "vLLM's flag, two ranks": (
        {"kv_cache_dtype": "squat2", "kv_cache_dtype_skip_layers": ["1"], "tensor_parallel_size": 2},
        "256 True 12416 ['1'] False None",
        "kvq: format=squat2 bits=3.031 N=256 W=32 S=0 sidecar_bytes=24832 (per request and layer) exempt=1 "
        "path=C++ capacity_tokens=23249 bf16_tokens=24250 ratio=0.96 (requests of 256 tokens)",
    ),
    "ngram": (
        {"kv_cache_dtype": "squat2", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        "128 True None [] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=0 sidecar_bytes=50176 (per request and layer) exempt=none "
        "path=C++ capacity_tokens=42624 bf16_tokens=24500 ratio=1.74 (requests of 256 tokens)",
    ),
    "a draft model": (
        {"kv_cache_dtype": "lossless", "block_size": 32, "draft": "draft_model", **kvq(W=32, S=4)},
        "32 True 16640 [] True auto",
        "kvq: format=lossless bits=16.250 N=32 W=32 S=4 sidecar_bytes=66560 (per request and layer) exempt=draft "
        "path=C++ capacity_tokens=12787 bf16_tokens=16250 ratio=0.79 (requests of 256 tokens)",
    ),
    "a draft beside a skipped layer": (
        {"kv_cache_dtype": "squat2", "draft": "eagle3", **kvq(skip_layers=[0])},
        "256 True 24832 ['0'] False auto",
        "kvq: format=squat2 bits=3.031 N=256 W=32 S=0 sidecar_bytes=49664 (per request and layer) exempt=0,draft "
        "path=C++ capacity_tokens=13460 bf16_tokens=16166 ratio=0.83 (requests of 256 tokens)",
    ),
    "windows": (
        {"kv_cache_dtype": "squat2", "max_model_len": 512, "model": "Gemma-3"},
        "512 True 49408 ['sliding_window'] False None",
        "kvq: format=squat2 bits=3.016 N=512 W=32 S=0 sidecar_bytes=98816 (per request and layer) "
        "exempt=sliding_window path=C++ capacity_tokens=5812 bf16_tokens=16083 ratio=0.36 (requests of 512 tokens)",
    ),
}
"""What is configured; what vLLM's configuration says then (see `told`); the start-up line for 1000 blocks."""


@pytest.fixture
def bare(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bare:
    """vLLM's configuration as it is before anything of ours is written into it."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(platform, "apply", lambda served, vllm_config: None)

    def make(**arguments: Any) -> Any:
        where: Path = model
        if arch := arguments.pop("model", None):
            config = named(arch).build()
            config.architectures = ["Gemma3ForCausalLM"]
            config.save_pretrained(where := tmp_path / "model")
            arguments |= {"skip_tokenizer_init": True, "dtype": "float32"}
        if method := arguments.pop("draft", None):
            from proof.models.draft import random_draft

            draft = random_draft(tmp_path / "draft", model, method=method)
            arguments["speculative_config"] = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
        return EngineArgs(model=str(where), **{"max_model_len": 256, **arguments}).create_engine_config()

    return make


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


def test_the_platform_does_all_of_it(model: Path) -> None:
    """Without the fixture: vLLM itself gets there, and a second configuration is not affected by a first."""
    from vllm.engine.arg_utils import EngineArgs

    for case in ("a skipped layer", "plain"):
        arguments, written, _ = CASES[case]
        made = EngineArgs(model=str(model), max_model_len=256, **copy.deepcopy(arguments)).create_engine_config()
        assert told(made) == written


def test_another_dtype_is_left_alone(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256, additional_config={"kvq": 3}).create_engine_config()
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

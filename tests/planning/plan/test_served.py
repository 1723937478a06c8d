"""What is served: made only from the configuration, the same in every process, and all that is written or printed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configurations import CASES
from engine_arguments import kvq

from proof.demo.capacity import parse_capacity
from vllm_kvq.integration.plan import refusals
from vllm_kvq.integration.plan.plan import apply, plan
from vllm_kvq.integration.worker import report
from vllm_kvq.integration.worker.sharing import SharingLayer, check_sharing
from vllm_kvq.kernels.paths import Path as KernelPath
from vllm_kvq.problem import Refused

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]


def told(vllm_config: Any) -> str:
    cache, spec = vllm_config.cache_config, vllm_config.speculative_config
    return (
        f"{cache.block_size} {cache.user_specified_block_size} "
        f"{cache.kv_cache_dtype_skip_layers} {cache.enable_prefix_caching} {spec and spec.kv_cache_dtype}"
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_and_printed(case: str, bare: Bare) -> None:
    arguments, written, line = CASES[case]
    vllm_config = bare(**arguments)
    untouched = told(vllm_config)
    refusals.check(vllm_config)
    served = plan(vllm_config)
    assert told(vllm_config) == untouched

    for _ in range(2):  # vLLM asks again for every copy of a configuration that it makes
        apply(served, vllm_config)
        assert told(vllm_config) == written
        refusals.check(vllm_config)
    said = report.start_line(served, 1000)
    # the fingerprint is a random model's, and so it is another one each time
    assert said == f"{line} fingerprint={served.fingerprint}"
    assert parse_capacity(said) is not None

    # a worker's copy
    worker = pickle.loads(pickle.dumps(vllm_config))
    assert plan(worker) == plan(vllm_config) == served


def test_it_is_made_once(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config, another = bare(**CASES["plain"][0]), bare(**CASES["plain"][0])
    served = plan(vllm_config)
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    assert plan(vllm_config).path.name == "PyTorch" != served.path.name
    monkeypatch.delenv("VLLM_KVQ_KERNELS")
    again = plan(vllm_config)
    # what vLLM writes there once it has allocated its caches
    vllm_config.cache_config.block_size = 32
    assert plan(vllm_config) is again
    assert plan(another) is not again
    assert again == served


def test_what_is_served_is_frozen_and_has_reasons(bare: Bare) -> None:
    plain, mixed, hybrid = (plan(bare(**CASES[case][0])) for case in ("plain", "windows", "a hybrid"))
    assert (plain.mixed, plain.recomputed) == (False, plain.format.W)
    # a state is kept at the end of each page
    vllm_config = bare(**CASES["a hybrid"][0])
    apply(plan(vllm_config), vllm_config)
    assert vllm_config.cache_config.mamba_block_size == hybrid.format.N == 256
    # what vLLM keeps of a window or a state stops where a prompt does
    assert (hybrid.mixed, hybrid.recomputed, hybrid.layers.packed) == (True, 0, 1)
    assert (mixed.mixed, mixed.recomputed) == (True, 0)
    assert (mixed.layers.packed, len(mixed.layers.windows), len(mixed.layers.skipped)) == (1, 5, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.max_len = 3  # type: ignore[misc]


def test_a_window_layer_that_is_skipped_counts_once(bare: Bare) -> None:
    vllm_config = bare(**CASES["windows"][0], **kvq(skip_layers=[0]))
    layers = plan(vllm_config).layers
    assert layers.kept == ("0", "sliding_window")
    assert layers.packed + len(layers.windows) + len(layers.skipped) == layers.total
    assert 0 in layers.windows
    assert layers.skipped == frozenset()


def test_layers_that_share_a_cache_count_for_nothing(bare: Bare) -> None:
    """The last three of seven layers; with the layer whose cache they share, no layer with full attention is packed."""
    gemma = {"kv_cache_dtype": "squat2", "model": "Gemma-3n"}
    layers = plan(bare(**gemma)).layers
    assert (layers.packed_layers, layers.windows, layers.sharing) == ((0, 3), {1, 2}, {4, 5, 6})
    assert layers.kept == ("sliding_window",)
    vllm_config = bare(**gemma, **kvq(skip_layers=[3]))
    served = plan(vllm_config)
    apply(served, vllm_config)
    assert plan(vllm_config) == served
    assert (served.layers.packed_layers, served.layers.skipped) == ((0,), {3})
    assert served.layers.kept == ("3", "5", "6", "sliding_window")


@pytest.mark.parametrize(
    ("index", "target", "why"),
    [
        (2, {}, "that this model's configuration does not name"),
        (6, {"learned": 1}, "and have learned attention sinks"),
        (6, {"head_size": 128}, "with other KV heads"),
        (6, None, "of layers.3, which is not packed"),
    ],
)
def test_a_cache_that_can_not_be_shared(index: int, target: dict[str, Any] | None, why: str, bare: Bare) -> None:
    vllm_config = bare(kv_cache_dtype="squat2", model="Gemma-3n")
    own = {"vllm_config": vllm_config, "learned": None, "num_kv_heads": 2, "head_size": 64}
    impl = SimpleNamespace(**own)
    layers = plan(vllm_config).layers
    check_sharing(6, impl, "layers.3", SimpleNamespace(**own), layers)
    with pytest.raises(Refused, match=f"do not support layers that share a KV cache {why}; use"):
        check_sharing(index, impl, "layers.3", None if target is None else SimpleNamespace(**own | target), layers)


def test_a_layer_whose_cache_is_shared_runs_first() -> None:
    target = SimpleNamespace(name="layers.3", fmt=None, readers=[], shared=None)
    layer = SharingLayer("layers.6", target, lambda fmt: fmt)  # type: ignore[arg-type, return-value]
    (bind,) = target.readers
    bind("with constants")
    assert layer.step == "with constants"  # type: ignore[comparison-overlap]
    with pytest.raises(RuntimeError, match=r"layers\.6: layers\.3, whose KV cache it shares, has not run before it"):
        layer.run(None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_the_platform_does_all_of_it(case: str, configured: Bare) -> None:
    """Without the fixture: vLLM itself gets there, and a first configuration does not affect a second."""
    arguments, written, _ = CASES[case]
    assert told(configured(**copy.deepcopy(arguments))) == written
    plain, expected, _ = CASES["plain"]
    assert told(configured(**copy.deepcopy(plain))) == expected


@pytest.mark.parametrize(("form", "tokens"), [("squat2", 32), ("lossless", 128)])
def test_pages_of_a_window_fill_the_blocks_of_the_pool(form: str, tokens: int, bare: Bare) -> None:
    """Where packed pages have a fifth of their bytes; and as many, where smaller ones would save nothing."""
    long = {"sliding_window": 512, "max_position_embeddings": 2048}
    served = plan(bare(kv_cache_dtype=form, model="Gemma-3", max_model_len=2048, numbers=long))
    assert (served.format.N, served.window_block) == (128, tokens)


def test_a_kept_layers_builder_is_told_its_own_dtype(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 takes another dtype for fp8, and crashes on processors without AVX-512."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    from vllm_kvq.integration.worker.side_by_side import SideBySideBackend

    told: list[Any] = []
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "__init__", lambda self, *args: told.append(args[2]))
    vllm_config = bare(**CASES["windows"][0])
    SideBySideBackend.get_builder_cls()(None, [], vllm_config, None)
    assert told[0].cache_config.cache_dtype == "auto"
    assert vllm_config.cache_config.cache_dtype == "squat2"
    assert told[0].compilation_config is vllm_config.compilation_config


@pytest.mark.parametrize("chosen", [0, 5, 200])
@pytest.mark.parametrize("case", ["plain", "windows", "a skipped layer"])
def test_the_user_says_what_a_hit_leaves(case: str, chosen: int, bare: Bare) -> None:
    arguments = CASES[case][0]
    options = arguments.get("additional_config", {}).get("kvq", {})
    assert plan(bare(**{**arguments, **kvq(**options, recompute=chosen)})).recomputed == chosen
    assert plan(bare(**arguments)).recomputed == (0 if case == "windows" else 32)


def test_another_dtype_is_left_alone(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256).create_engine_config()
    # the block size is vLLM's own, which is another one in 0.33
    assert told(made).partition(" ")[2] == "False [] True None"


def test_the_line_stays_parseable() -> None:
    with pytest.raises(ValueError, match="one word"):
        KernelPath("the PyTorch kernels")


def test_what_is_said_at_start(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the pool is there; by then vLLM may have shortened the length and changed the block size."""
    arguments, _, line = CASES["plain"]
    vllm_config = bare(**{**arguments, "max_model_len": 1024})
    served = plan(vllm_config)
    line += f" fingerprint={served.fingerprint}"
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
    monkeypatch.setattr("vllm_kvq.kernels.cpu.slow.slow", lambda fmt: f"{fmt.name} is slow here")
    monkeypatch.setattr("vllm.distributed.parallel_state.is_global_first_rank", lambda: True)
    report.report_start(plan(bare(**{**arguments, "max_model_len": 1024})), vllm_config, 1000)
    assert said == [line, f"kvq: {served.format.name} is slow here"]

"""Options given by layer in real engines, judged by the reference, which resolves them independently.

The layers' pages then have several sizes, and their companions several layouts. Each engine serves several variants at
once, one per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
from engine_arguments import kvq

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.integration.worker import report
from vllm_kvq.problem import Refused

pytestmark = pytest.mark.engine
N = 64
Bare = Callable[..., Any]

SKETCHES = {
    "m": {"0": 256, "*": 128},
    "outliers": {"0": 0, "*": 4},
    "sketch": {"0": "gaussian", "*": "orthogonal"},
    "W": 64,
    "S": 8,
}
ANGLES = {"angle_bits": {"1": 3, "*": 4}, "mode": {"1": "paper", "*": "grouped"}, "W": 64}
RANKS = {"r": {"0": 16, "*": 2}}
"""Pages of one size, and states of two."""


def served(run: Any, model: Path, name: str, options: dict[str, Any], error: float, **engine: Any) -> None:
    todo = [traces.lengths(N, 20), *traces.prefixes(N)]
    arguments = {"block_size": N, "max_num_batched_tokens": 200, **engine}
    got = run(todo, kv_cache_dtype=name, additional_config={"kvq": options}, **arguments)

    def judged(options: dict[str, Any]) -> Any:
        return judge(ReplayModel(str(model), name, N, kernel_error=error, **options), todo, got)

    total = judged(options)
    assert not total.mismatches
    assert total.hits >= 3
    assert total.ties <= 0.02 * total.tokens
    # the control: the layers swapped
    for option, values in options.items():
        if isinstance(values, dict):
            (named, first), (_, rest) = values.items()
            assert judged({**options, option: {named: rest, "*": first}}).mismatches, option


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("qjl3", SKETCHES, 1e-2),
        pytest.param("polar3", ANGLES, 1e-3, marks=pytest.mark.wide),
        pytest.param("squat2", RANKS, 1e-3, marks=pytest.mark.wide),
    ],
)
def test_cpp_kernels(name: str, options: dict[str, Any], error: float, run: Any, model: Path) -> None:
    served(run, model, name, options, error)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qjl3", SKETCHES, marks=pytest.mark.wide),
        pytest.param("polar3", ANGLES, marks=pytest.mark.wide),
        pytest.param("squat2", RANKS, id="ranks"),
    ],
)
def test_pytorch_kernels(
    name: str, options: dict[str, Any], run: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    served(run, model, name, options, 0.0)


# -- what is said and refused, without an engine
def test_what_is_said(bare: Bare) -> None:
    made = plan(bare(**kvq("qjl3", m={"0": 1056, "*": 128}, seed={"0": 1, "*": 1})))
    assert [part.layers for part in made.parts] == [(0,), (1,)]
    assert report.part_lines(made) == ["kvq: layer 0: m=1056, bits=10.688", "kvq: layer 1: m=128, bits=3.438"]
    (sentence,) = report.path_warnings(made)
    assert sentence.startswith(
        "in layer 0 qjl3 is attended slowly here: the fast kernels don't serve its keys with m=1056"
    )
    alike = plan(bare(**kvq("qjl3", m={"0": 512, "*": 512})))
    assert (len(alike.parts), report.part_lines(alike), alike.mixed) == (1, [], False)


def test_the_slowest_path_serves_all_layers(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_GPU_PATH", "1")
    assert plan(bare(**kvq("qjl3"))).path.name == "GPU/CUDA"
    path = plan(bare(**kvq("qjl3", outliers={"1": 0, "*": 4}))).path
    assert path.name == "C++"
    assert str(path.why).startswith("for layer 1 qjl3 has no Triton kernel for its keys or values; the CUDA kernels")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"m": {"0": 64}}, "option 'm' is given by layer without \"*\", which sets it for all others"),
        ({"m": {"0-2": 64, "*": 32}}, "option 'm' names layer 2; the model has layers 0 to 1"),
        ({"m": {"0-1": 64, "1": 96, "*": 32}}, "option 'm' names layer 1 more than once"),
        ({"m": {"first": 64, "*": 32}}, "option 'm' is given by layer, and 'first' names none; write \"7\" or \"0-3\""),
        ({"W": {"0": 64, "*": 32}}, "option 'W' is given by layer, and must be the same in all layers"),
        ({"keys": {"0": "polar", "*": "qjl"}}, "option 'keys' is given by layer, and must be the same in all layers"),
        ({"m": {"0": 65, "*": 32}}, "option 'm' is 65; it takes a whole number from 32 to 2048, a multiple of 32"),
        ({"m": {"0": 64, "*": None}}, "option 'm' is null; leave it out to get the default"),
        ({"m": {"0": {"1": 64}, "*": 64}}, "option 'm' is {'1': 64}; it takes a whole number"),
        ({"r": {"0": 5, "*": 8}}, "option 'r' is not read by qjl3"),
        ({"outliers": {"0": 0, "*": 4}, "m_out": 64}, "option 'm_out' is set, but it has no effect with 'outliers' 0"),
        ({"m": {"1": 64, "*": 32}, "skip_layers": [1]}, "option 'm' names layer 1, which no format serves"),
    ],
)
def test_refusals(options: dict[str, Any], sentence: str, model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(Refused) as caught:
        EngineArgs(
            model=str(model), max_model_len=256, kv_cache_memory_bytes=1 << 30, **kvq("qjl3", **options)
        ).create_engine_config()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pages_of_several_sizes_stay_in_one_process(bare: Bare) -> None:
    stages = {"pipeline_parallel_size": 2}
    with pytest.raises(Refused, match="which do not work with pipeline parallelism; use --tensor-parallel"):
        bare(**kvq("qjl3", m={"0": 256, "*": 128}), **stages)
    assert plan(bare(**kvq("qjl3", seed={"0": 1, "*": 2}), **stages)).mixed is False

"""Several processes give the tokens of one, in float32: tensor and pipeline parallelism, over two executors."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from pathlib import Path

import pytest
from farm import BYTES, ELSEWHERE, ENGINE, TRACES, VARIABLES, Answer, Farm, N, few_tokens, same_tokens

from proof.demo.capacity import parse_capacity
from proof.kernels.exact import relative_error
from proof.oracle.compare import compare_all
from vllm_kvq import cli
from vllm_kvq.formats.constants import Constants
from vllm_kvq.integration.plan.calibration import read

pytestmark = pytest.mark.engine
wide = functools.partial(pytest.param, marks=pytest.mark.wide)


@pytest.mark.wide
def test_formats_differ(farm: Farm) -> None:
    """The control: these traces tell the formats apart."""
    answers = farm.run("one", "auto", "squat2", "qjl3")
    for i, a in enumerate(answers):
        for b in answers[i + 1 :]:
            assert compare_all(TRACES, a.results, b.results).mismatches


@pytest.mark.parametrize("name", ["lossless", wide("qjl3")])
def test_tensor_parallel(name: str, farm: Farm) -> None:
    got = same_tokens(farm, "tp2", name)
    # one KV head each; a layer's number, which QJL's sketch is seeded with, is the same on both
    assert [{layer["heads"] for layer in rank.values()} for rank in got.ranks] == [{1}, {1}]
    first, second = ([(n, x["index"], x["seed"]) for n, x in rank.items()] for rank in got.ranks)
    assert first == second
    assert [index for _, index, _ in first] == [0, 1, 2, 3]


def test_two_ranks_fit_the_constants_of_one(farm: Farm) -> None:
    """Each rank sums what its own head has seen. All have the same file, which one process then reads; and what another
    process fits by itself differs only by the order of sums."""
    ranks = same_tokens(farm, "tp2 by bytes", "klt3").ranks
    together, fitted, digest = constants(farm, "one")
    assert {layer["constants"] for rank in ranks for layer in rank.values()} == {digest}
    farm.run(ELSEWHERE, "klt3")
    by_itself, fitted_again, _ = constants(farm, ELSEWHERE)
    assert by_itself.name == together.name
    for layer, found in fitted_again.items():
        means = (x.keys[:, :2] for x in (found, fitted[layer]))  # type: ignore[index]
        assert relative_error(*means) < 1e-4


def constants(farm: Farm, kind: str) -> tuple[Path, dict[int, Constants], str]:
    """The only file that engines of this kind have found or left, and what is in it."""
    (file,) = (farm.cache_of(kind) / "vllm_kvq" / "calibration").iterdir()
    return file, *read(file)


def test_two_ranks_have_what_was_planned(farm: Farm) -> None:
    """With a KV head each."""
    has_what_was_planned(farm, "klt3", "two heads", same_tokens(farm, "tp2 by bytes", "klt3"))


def test_copies_of_a_kv_head_stay_equal(farm: Farm) -> None:
    """One KV head, two ranks: both pack its pages, each with other query heads, and arrive at the same bytes."""
    got = same_tokens(farm, "tp2 by bytes", "squat2", model="one head")
    check_copies(got)
    has_what_was_planned(farm, "squat2", "one head", got)


def has_what_was_planned(farm: Farm, name: str, model: str, got: Answer) -> None:
    """`vllm-kvq plan` knows the tokens of our start-up line and of vLLM's, from config.json and a rank's bytes."""
    flags = ["--tp", "2", "--cache-bytes", str(BYTES), "--context", str(ENGINE["max_model_len"]), "--dtype", "float32"]
    flags += ["--block-size", str(N), "--max-num-batched-tokens", str(ENGINE["max_num_batched_tokens"])]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["plan", str(farm.model(model)), *flags, "--formats", name, "--json"]) == 0
    (row,) = [row for row in json.loads(printed.getvalue())["caches"] if row["name"] == name]
    said = parse_capacity(got.log)
    assert said is not None
    assert said.tokens == row["tokens"] > ENGINE["max_model_len"]
    counted = re.findall(r"KV cache size: ([\d,]+) tokens", got.log)
    assert {int(number.replace(",", "")) for number in counted} == {row["tokens"]}


@pytest.mark.wide
def test_copies_of_a_kv_head_stay_equal_on_the_gpus_path(tmp_path: Path) -> None:
    """Each rank sees the other's queries before it computes SQuat's subspace. Triton's kernels are interpreted."""
    farm = Farm(tmp_path, VARIABLES | {"VLLM_KVQ_GPU_PATH": "1"}, few_tokens())
    try:
        check_copies(same_tokens(farm, "tp2", "squat2", model="one head", error=1e-3))
    finally:
        farm.close()


@pytest.mark.wide
def test_each_of_two_kv_heads_on_two_ranks(farm: Farm) -> None:
    """Four ranks: neighbours hold copies of one KV head and pack equal pages, each pair its own."""
    ranks = same_tokens(farm, "tp4", "squat2").ranks
    assert all(layer["written"] and layer["heads"] == 1 for rank in ranks for layer in rank.values())
    # what follows the first layer is a sum over four ranks, which each of them adds up in a different order
    first, again, second, last = (min(rank.items())[1]["digest"] for rank in ranks)
    assert first == again
    assert second == last
    assert first != second


def check_copies(got: Answer) -> None:
    first, second = got.ranks
    assert all(layer["written"] for layer in first.values())
    assert first == second


@pytest.mark.parametrize("name", [wide("lossless"), "qjl3", wide("squat2")])
def test_pipeline_parallel(name: str, farm: Farm) -> None:
    check_stages(same_tokens(farm, "pp2", name))


def check_stages(got: Answer) -> None:
    """Two layers each, numbered as in one process: QJL's sketch is seeded with the number."""
    assert [[layer["index"] for layer in rank.values()] for rank in got.ranks] == [[0, 1], [2, 3]]
    assert all(layer["written"] for rank in got.ranks for layer in rank.values())


def test_data_parallel(farm: Farm) -> None:
    """Whichever engine answers, the tokens are plain vLLM's. No cache is shared: each hits only its own requests."""
    plain = farm.run("one", "auto")[0].results
    expected = {name: tokens for result in plain for name, tokens in result.outputs.items()}
    engines = farm.run("dp2", "lossless")[0].results
    assert len(engines) == 2
    for engine in engines:
        assert engine.outputs == expected
        assert {name for name, tokens in engine.cached.items() if tokens} == {"tail", "deep"}


@pytest.mark.wide
def test_data_parallel_engines_draw_one_sketch(farm: Farm) -> None:
    """vLLM seeds each engine differently."""
    first, second = farm.run("dp2", "qjl3")[0].results
    assert first.outputs == second.outputs


@pytest.mark.wide
def test_ray_tensor_parallel(farm: Farm) -> None:
    assert len(same_tokens(farm, "ray tp2", "squat2").ranks) == 2


@pytest.mark.wide
def test_ray_pipeline_parallel(farm: Farm) -> None:
    check_stages(same_tokens(farm, "ray pp2", "lossless"))

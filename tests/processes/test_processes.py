"""Several processes give the tokens of one, in float32: tensor parallelism, over two executors."""

from __future__ import annotations

import pytest
from farm import Farm, difference, same_tokens

pytestmark = pytest.mark.engine


def test_formats_differ(farm: Farm) -> None:
    """The control: these traces tell the formats apart."""
    answers = farm.run("one", "auto", "squat2", "qjl3")
    for i, a in enumerate(answers):
        for b in answers[i + 1 :]:
            assert difference(a, b).mismatches


@pytest.mark.parametrize("name", ["lossless", "qjl3"])
def test_tensor_parallel(name: str, farm: Farm) -> None:
    got = same_tokens(farm, "tp2", name)
    # one KV head each; a layer's number, which QJL's sketch is seeded with, is the same on both
    assert [{layer["heads"] for layer in rank.values()} for rank in got.ranks] == [{1}, {1}]
    first, second = ([(n, x["index"], x["seed"]) for n, x in rank.items()] for rank in got.ranks)
    assert first == second
    assert [index for _, index, _ in first] == [0, 1, 2, 3]


def test_copies_of_a_kv_head_stay_equal(farm: Farm) -> None:
    """One KV head, two ranks: both pack its pages, each beside other query heads, and arrive at the same bytes."""
    first, second = same_tokens(farm, "tp2", "squat2", model="one head").ranks
    assert all(layer["written"] for layer in first.values())
    assert first == second


def test_ray(farm: Farm) -> None:
    assert len(same_tokens(farm, "ray tp2", "squat2").ranks) == 2

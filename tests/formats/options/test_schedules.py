"""Options given by layer: which value each layer gets, and what is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_kvq.formats import FORMATS, Geometry
from vllm_kvq.formats.by_layer import REST, SHARED, ByLayer, all_options, options_at, schedules, written
from vllm_kvq.formats.settings import COMMON

OPTIONS = {"m": {"0-3": 512, "7": 128, REST: 256}, "seed": {"3-5": 1, REST: 2}, "W": 64}


def test_every_layer_gets_its_values() -> None:
    want = [(512, 2)] * 3 + [(512, 1), (256, 1), (256, 1), (256, 2), (128, 2), (256, 2)]
    assert [(o["m"], o["seed"]) for o in (options_at(OPTIONS, layer) for layer in range(9))] == want
    assert options_at(OPTIONS, None) == options_at(OPTIONS, 100) == {"m": 256, "seed": 2, "W": 64}
    assert all(options_at(OPTIONS, layer)["W"] == 64 for layer in range(9))
    assert options_at({"m": {2: 64, REST: 32}}, 2) == {"m": 64}, "YAML and Python write a layer as a number"
    plain = {"m": 64, "skip_layers": [1]}
    assert options_at(plain, 1) == plain
    assert schedules(plain) == []


def test_every_set_of_values_is_found() -> None:
    found = all_options(OPTIONS)
    assert len(found) == 5
    assert all(options_at(OPTIONS, layer) in found for layer in range(12))


def refusal(option: str, given: dict[Any, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        ByLayer.of(option, given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["a", "", "3-0", "-1", "1-", "0-3-5", "0,1", "1.5", " 1", "٣", None, True, 1.5, (1,), -2]
)
def test_what_names_no_layers(name: Any) -> None:
    said = f'option \'m\' is given by layer, and {name!r} names none; write "7" or "0-3", and "*" for others'
    assert refusal("m", {name: 1, REST: 2}) == said


def test_the_rest_must_be_said() -> None:
    assert refusal("m", {"0-99": 1}) == "option 'm' is given by layer without \"*\", which sets it for all others"


@pytest.mark.parametrize("given", [{"0-3": 1, "3": 2}, {"3": 1, 3: 2}, {"2-9": 1, "0-3": 1}])
def test_a_layer_is_named_once(given: dict[Any, Any]) -> None:
    assert refusal("m", {**given, REST: 1}) in [f"option 'm' names layer {i} more than once" for i in (2, 3)]


def test_what_is_the_same_in_all_layers() -> None:
    assert set(SHARED) == {"keys", "values", *(option.name for option in COMMON)}
    for option in SHARED:
        assert refusal(option, {"0": 1, REST: 2}) == (
            f"option {option!r} is given by layer, and must be the same in all layers"
        )


def test_layers_that_are_not_there() -> None:
    schedule = ByLayer.of("m", {"2-4": 64, REST: 32})
    schedule.check(packed=range(5), total=5)
    schedule.check(packed=[4], total=5)
    with pytest.raises(ValueError, match=r"^option 'm' names layer 4; the model has layers 0 to 3$"):
        schedule.check(packed=range(4), total=4)
    with pytest.raises(ValueError, match=r"^option 'm' names layers 2-4, which no format serves$"):
        schedule.check(packed=[0, 1, 5], total=6)


def test_a_single_layer_takes_single_values() -> None:
    with pytest.raises(ValueError) as caught:
        FORMATS["qjl3"].bind(Geometry(64, 64), {"m": {"0": 64, REST: 32}})
    assert str(caught.value) == (
        "option 'm' is {'0': 64, '*': 32}; it takes a whole number from 32 to 2048, a multiple of 32; it may "
        "be given by layer only when a whole model is served"
    )


@pytest.mark.parametrize(
    ("layers", "text"),
    [([7], "layer 7"), ([0, 1, 2, 3], "layers 0-3"), ([9, 1, 2], "layers 1-2 and 9"), ([0, 2, 4], "layers 0, 2 and 4")],
)
def test_layers_in_sentences(layers: list[int], text: str) -> None:
    assert written(layers) == text

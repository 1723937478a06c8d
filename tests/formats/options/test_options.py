"""Bad options and geometries are refused with a sentence that names them and what they may be."""

import keyword
import math
import re
from typing import Any

import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.settings import COMMON, Settings
from vllm_kvq.formats.table import declared_options, key_codecs, readers, value_codecs

OPTIONS = {option.name: option for option, _ in declared_options()}
# a format that reads the option
READER = {
    "r": "squat2", "lam": "squat2", "floor": "squat2", "g": "squat2", "rope": "squat2", "boost": "squat2",
    "key_bits": "squat2",
    "m": "qjl3", "m_out": "qjl3", "outliers": "qjl3", "outlier_choice": "qjl3", "sketch": "qjl3", "seed": "qjl3",
    "mode": "polar4", "angle_bits": "polar4", "radius_bits": "polar4", "pairing": "polar4",
    "quant_mode": "innerq2", "key_norm": "innerq2", "key_rate": "klt3", "searched_bits": "klt3",
}  # fmt: skip
WRONG_TYPES: list[Any] = ["5", [5], {"a": 1}, True, 5.5, math.nan, math.inf, (2,)]


def reader(option: str) -> str:
    return READER.get(option, "kivi2")


def refusal(name: str, options: dict[Any, Any], head: int = 128) -> str:
    with pytest.raises(ValueError) as caught:
        FORMATS[name].bind(Geometry(head, 64), options)
    with pytest.raises(ValueError):
        roundtrip(name, torch.zeros(4, 1, head), torch.zeros(4, 1, head), **{str(k): v for k, v in options.items()})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "skip_layers"])
@pytest.mark.parametrize("value", WRONG_TYPES, ids=repr)
def test_wrong_types(option: str, value: Any) -> None:
    if option == "lam" and value == 5.5:
        value = 0.5
    message = refusal(reader(option), {option: value})
    assert message.startswith(f"option {option!r} is {value!r}; it takes ")


@pytest.mark.parametrize("option", [o for o in OPTIONS if OPTIONS[o].choices])
def test_choices(option: str) -> None:
    spec = OPTIONS[option]
    bad: list[Any] = ["other", "", 5, 0, -2, 2.0, 4.0, "2"]
    for value in bad:
        message = refusal(reader(option), {option: value})
        assert message == f"option {option!r} is {value!r}; it takes one of {list(spec.choices)}"
    for choice in spec.choices:
        if option not in ("keys", "values"):
            FORMATS[reader(option)].bind(Geometry(128, 64), {option: choice})


@pytest.mark.parametrize("option", [o for o in OPTIONS if not OPTIONS[o].choices and o != "skip_layers"])
def test_ranges(option: str) -> None:
    spec = OPTIONS[option]
    step = spec.multiple or 0.01
    for value in (spec.low - step, spec.high + step, -1, 10**12):
        message = refusal(reader(option), {option: value})
        assert f"option {option!r} is {value!r}" in message
        assert f"from {spec.low:g} to {spec.high:g}" in message
    if spec.multiple > 1:
        assert f"a multiple of {spec.multiple}" in refusal(reader(option), {option: int(spec.low) + 1})
    for value in (spec.low, spec.high):
        # the limits are allowed (a g of the whole head is plain KIVI: take a larger head; sinks fit in their
        # page)
        value = int(value) if spec.multiple else value
        settings = FORMATS[reader(option)].settings({option: value})
        assert value in (getattr(settings, option, None), settings.get(option))
        if option != "S":
            # a window of keys is no longer than W
            rest = {"W": 4096} if option == "W_keys" else {}
            FORMATS[reader(option)].bind(Geometry(256, 64), {option: value, **rest})


def test_the_first_four_tokens_are_sinks() -> None:
    """Every format for users has the same default except InnerQ, whose paper says 32; 0 means none."""
    found = {name: fmt.settings().S for name, fmt in FORMATS.items() if fmt.public}
    assert found == {name: 32 if name == "innerq2" else 4 for name in found}
    assert len(found) > 8
    assert {fmt.settings({"S": 0}).S for fmt in FORMATS.values()} == {0}
    # combinations that users make themselves have them, too
    assert FORMATS["polar4"].settings({"keys": "kivi"}).S == 4


def test_every_option_is_a_setting_with_a_default_in_range() -> None:
    names = {"keys", "values"}
    for fmt in FORMATS.values():
        assert isinstance(fmt.settings(), Settings)
        settings = fmt.settings({})
        assert settings == fmt.settings()
        assert (settings.keys, settings.values) == (fmt.keys, fmt.values)
        declared = {option.name: option for option in (*COMMON, *fmt.keys.options, *fmt.values.options)}
        common = {n: x for n, x in vars(settings).items() if n not in ("keys", "values", "own")}
        for name, value in (common | dict(settings.own)).items():
            assert value == fmt.defaults.get(name, declared[name].default)
            if value is not None:
                declared[name].check(value)
        if fmt.public:
            names |= {*common, *dict(settings.own)}
    assert names == set(OPTIONS)
    assert len(OPTIONS) == len(declared_options()), "two options have the same name"
    for option, codecs in declared_options():
        assert option.help, option.name
        assert set(codecs) <= {*key_codecs(), *value_codecs()}


@pytest.mark.parametrize("option", OPTIONS)
def test_null(option: str) -> None:
    message = refusal(reader(option), {option: None})
    assert message == f"option {option!r} is null; leave it out to get the default"


@pytest.mark.parametrize("option", ["rank", "lambda", "R", "", " r", "bits", 1, None])
def test_unknown_options(option: Any) -> None:
    message = refusal("squat2", {option: 1})
    assert f"unknown kvq option {option!r}" in message
    assert "did you mean '" in message or all(known in message for known in OPTIONS)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.public])
def test_options_of_other_methods_are_refused(name: str) -> None:
    """An option is never accepted and ignored."""
    used = {FORMATS[name].keys.name, FORMATS[name].values.name}
    sample = {"r": 8, "lam": 1e-3, "floor": 1, "g": 32, "m": 64, "m_out": 64, "outliers": 4, "seed": 1,
              "outlier_choice": "slab", "sketch": "gaussian", "mode": "paper",
              "angle_bits": 4, "radius_bits": 4, "pairing": "half",
              "key_bits": 2, "value_bits": 2, "group": 32, "key_scales": "fitted", "value_scales": "fitted",
              "quant_mode": "symmetric", "key_norm": "none", "token_scale": "none", "boost": "half",
              "value_rotation": "hadamard"}  # fmt: skip
    for option, value in sample.items():
        if used & set(readers()[option]):
            others = {"key_bits": 2} if option == "boost" and "squat" in used else {}
            FORMATS[name].bind(Geometry(128, 64), {option: value, **others})
        else:
            message = refusal(name, {option: value})
            assert f"option {option!r} is not read by {name}" in message
            assert message.endswith(f"it belongs to {', '.join(readers()[option])}")


def test_changing_a_codec_brings_its_options() -> None:
    FORMATS["kivi2"].bind(Geometry(128, 64), {"keys": "qjl", "m": 64})
    assert "not read by squat2" in refusal("squat2", {"keys": "kivi", "r": 4})


def test_defaults_follow_their_option_to_another_codec() -> None:
    """Defaults are dropped where the codec has no such option."""
    settings = FORMATS["squat4"].settings
    assert settings({"keys": "kivi"}).get("key_bits") == 4
    assert settings({"keys": "qjl"}).get("key_bits") is None
    assert settings({"keys": "qjl"}).get("value_bits") == 4
    assert FORMATS["polar4"].settings({"values": "innerq"}).get("group") is None
    assert FORMATS["polar4"].settings({"values": "raw"}).get("value_bits") is None
    for fmt in FORMATS.values():
        for keys in key_codecs():
            for values in value_codecs():
                geometry = Geometry(128, fmt.settings().N or 64)
                assert fmt.bind(geometry, {"keys": keys, "values": values}).bits_per_element > 2


def test_pairing_replaces_that_of_the_geometry() -> None:
    bound = FORMATS["polar4"].bind(Geometry(128, 64, pairing="half"), {"pairing": "interleaved"})
    assert bound.geometry.pairing == "interleaved"
    assert bound.keys.y[:2].tolist() == [1, 3]  # type: ignore[attr-defined]
    assert FORMATS["polar4"].bind(Geometry(128, 64, pairing="interleaved")).geometry.pairing == "interleaved"


def test_an_option_of_the_other_half_only() -> None:
    """QJL's keys have no `key_bits`, though InnerQ's values come from a method whose keys do."""
    assert "'key_bits' is not read by qjl3" in refusal("qjl3", {"values": "innerq", "key_bits": 2})


def test_the_test_codec_is_no_choice() -> None:
    assert "'keys' is 'lossless'" in refusal("squat2", {"keys": "lossless"})


@pytest.mark.parametrize("value", [1, "1", {1: 1}, [True], [1.0], ["0"], [[0]]], ids=repr)
def test_skip_layers(value: Any) -> None:
    assert "option 'skip_layers' is " in refusal("squat2", {"skip_layers": value})
    assert FORMATS["squat2"].settings({"skip_layers": [3, 0]}).skip_layers == (3, 0)


def test_layers_counted_from_the_last() -> None:
    settings = FORMATS["squat2"].settings({"skip_layers": [0, 1, -2, -1]})
    assert settings.skipped(30) == {0, 1, 28, 29}
    assert settings.skipped(3) == {0, 1, 2}
    for layer, total in ((30, 30), (-31, 30), (1, 1)):
        message = f"option 'skip_layers' names layer {layer}; the model has layers 0 to {total - 1} "
        with pytest.raises(ValueError, match=re.escape(message)):
            FORMATS["squat2"].settings({"skip_layers": [layer]}).skipped(total)


def test_turboquant_leaves_the_first_and_the_last_two_layers() -> None:
    """Unless the user says otherwise."""
    for name in ("turbo3", "turbo4"):
        assert FORMATS[name].settings().skipped(28) == {0, 1, 26, 27}
        assert not FORMATS[name].settings({"skip_layers": []}).skipped(28)


@pytest.mark.parametrize("name", ["squat9", "", "SQUAT2", "bf16", "lossles"])
def test_unknown_formats(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        get_format(name)
    message = str(caught.value)
    assert f"{name!r}" in message
    assert all(f.name in message for f in FORMATS.values() if f.public)
    assert "lossless" not in message
    with pytest.raises(ValueError, match="unknown KV cache format"):
        roundtrip(name, torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))


@pytest.mark.parametrize("block", [0, -32, 1, 16, 33, 48, 100])
def test_block_sizes(block: int) -> None:
    with pytest.raises(ValueError, match=f"block size {block} is not a multiple of 32; use --block-size"):
        Geometry(128, block)


@pytest.mark.parametrize("head", [0, 32, 63, 72, 100, 160, 1024, -64])
def test_head_sizes(head: int) -> None:
    with pytest.raises(ValueError) as caught:
        Geometry(head, 64)
    assert str(caught.value) == f"head size {head} is not supported; supported are {list(HEAD_SIZES)}"


BAD_GEOMETRY: list[dict[str, Any]] = [
    {"dtype": torch.float64},
    {"dtype": torch.int8},
    {"pairing": "none"},
    {"rotary_dim": 31},
    {"rotary_dim": 130},
    {"rotary_dim": 0},
]


@pytest.mark.parametrize("bad", BAD_GEOMETRY, ids=repr)
def test_other_geometry(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Geometry(128, 64, **bad)


@pytest.mark.parametrize("g", [64, 80, 128])
def test_one_block_is_nothing_to_correct(g: int) -> None:
    assert "that is Kitty; use kitty2" in refusal("squat2", {"g": g}, head=64)
    assert "that is KIVI; use kivi2" in refusal("squat4", {"g": g}, head=64)


@pytest.mark.parametrize("head", HEAD_SIZES)
def test_defaults_that_the_head_size_decides(head: int) -> None:
    squat = FORMATS["squat2"].bind(Geometry(head, 64)).keys
    d = Geometry(head, 64).d
    assert squat.block == {64: 32, 96: 48, 128: 64, 192: 64, 256: 64, 512: 64}[d]  # type: ignore[attr-defined]
    if d <= 256:
        qjl = FORMATS["qjl3"].bind(Geometry(head, 64)).keys
        assert (qjl.m, qjl.m_out, qjl.n) == (2 * d, d, d // 16)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "value", "query"),
    [((4, 2, 64), (4, 1, 64), None), ((4, 64), (4, 64), None), ((4, 2, 64), (4, 2, 64), (4, 3, 64))],
)
def test_shapes_of_roundtrip(key: tuple[int, ...], value: tuple[int, ...], query: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError):
        roundtrip("squat2", torch.zeros(key), torch.zeros(value), None if query is None else torch.zeros(query))


@pytest.mark.parametrize(("option", "value"), [("W", 64), ("S", 4), ("recompute", 0), ("skip_layers", [1])])
def test_roundtrip_refuses_what_it_could_only_ignore(option: str, value: Any) -> None:
    x = torch.zeros(4, 1, 64)
    with pytest.raises(
        ValueError, match=f"^roundtrip quantizes every token of one layer, so it takes no option '{option}'$"
    ):
        roundtrip("squat2", x, x, **{option: value})


def test_every_option_is_a_name_that_python_takes() -> None:
    """So that `roundtrip(..., name=value)` can say it."""
    names = [option.name for option, _ in declared_options()]
    assert [name for name in names if keyword.iskeyword(name) or not name.isidentifier()] == []


def test_an_option_that_was_meant() -> None:
    with pytest.raises(ValueError, match=r"unknown kvq option 'lambda'; did you mean 'lam'\?$"):
        get_format("squat2").settings({"lambda": 0.01})

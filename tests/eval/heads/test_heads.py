"""Errors of single heads compared with formulas; and a head that was damaged on purpose is the one that is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.eval.heads.heads import READERS, HeadError, as_cached, bound, head_errors, layer_errors
from vllm_kvq.eval.heads.synthetic import attention_data
from vllm_kvq.eval.peers.oscar import OscarKeys
from vllm_kvq.formats import Geometry, get_format, roundtrip
from vllm_kvq.formats.constants import Calibration, Constants, Moments
from vllm_kvq.formats.methods.klt import TransformedKeys
from vllm_kvq.formats.methods.squat import PLAIN
from vllm_kvq.formats.parts.rope import Rope

PRE = {**PLAIN, "rope": "before"}
"""The paper's SQuat-pre."""

TOKENS = 256 + READERS
HEADS, GROUP, SIZE = 2, 2, 64


@pytest.fixture(scope="module")
def captured() -> Captured:
    layers = []
    for index in (0, 3):
        query, key, value = attention_data(SIZE, TOKENS, HEADS, GROUP, rope=True, seed=index)
        layers.append(Layer(index, query, key, value, SIZE**-0.5))
    return Captured(tuple(layers), windows=(1,), pairing="half", rotary_dim=SIZE, rope=Rope.plain(SIZE, TOKENS))


def test_lossless_has_no_error(captured: Captured) -> None:
    found = head_errors(captured, "lossless", {})
    assert [(e.layer, e.head) for e in found] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert all((e.score, e.value, e.output) == (0, 0, 0) for e in found)


def test_errors_follow_their_definitions(captured: Captured) -> None:
    """Written out, one head and one query at a time."""
    layer, context = captured.layers[1], TOKENS - READERS
    page = bound(captured, layer, "kivi2", {}, 128)
    found = layer_errors(page, layer)
    key_hat, value_hat = as_cached(page, layer.query[:context], layer.key[:context], layer.value[:context])
    for head in range(HEADS):
        k, k_hat, v, v_hat = (x[:context, head].double() for x in (layer.key, key_hat, layer.value, value_hat))
        exact, read, outputs, outputs_hat = [], [], [], []
        for query in layer.query[context:, head * GROUP : (head + 1) * GROUP].flatten(0, 1).double():
            exact.append(k @ query)
            read.append(k_hat @ query)
            outputs.append((exact[-1] / SIZE**0.5).softmax(0) @ v)
            outputs_hat.append((read[-1] / SIZE**0.5).softmax(0) @ v_hat)
        wanted = [
            (torch.stack(b) - torch.stack(a)).norm() / torch.stack(a).norm()
            for a, b in ((exact, read), (list(v), list(v_hat)), (outputs, outputs_hat))
        ]
        assert [found[head].score, found[head].value, found[head].output] == pytest.approx([x.item() for x in wanted])


def test_window_and_sinks_are_exact_and_the_rest_is_what_the_pages_hold(captured: Captured) -> None:
    layer = captured.layers[0]
    page = bound(captured, layer, "innerq2", {}, 128)
    assert (page.W, page.S) == (96, 32)
    # of 250 tokens 154 are older than the window, and 128 of them fill pack units
    query, key, value = (x[:250] for x in (layer.query, layer.key, layer.value))
    for exact, hat in zip((key, value), as_cached(page, query, key, value), strict=True):
        assert torch.equal(hat[:32], exact[:32])
        assert torch.equal(hat[128:], exact[128:])
        assert (hat[32:128] != exact[32:128]).any(-1).all()
    # the norm that InnerQ divides by is the whole prompt's, so it is roundtrip's only if all tokens are packed
    whole = replace(page, settings=replace(page.settings, W=0, S=0))
    for ours, theirs in zip(as_cached(whole, *(x[:256] for x in (layer.query, layer.key, layer.value))),
                            roundtrip("innerq2", layer.key[:256], layer.value[:256], N=128), strict=True):  # fmt: skip
        assert torch.equal(ours, theirs)


def test_a_format_is_fitted_to_the_whole_prompt(captured: Captured) -> None:
    """InnerQ divides by the norms of all keys, including those that are too new to be packed."""
    layer = captured.layers[0]
    page = bound(captured, layer, "innerq2", {}, 128)
    newest = layer.key.clone()
    newest[-1, :, ::2] *= 20
    ours, other = (as_cached(page, layer.query, key, layer.value)[0] for key in (layer.key, newest))
    assert not torch.equal(ours[32:128], other[32:128])


def test_a_window_as_long_as_the_text_leaves_nothing_to_pack(captured: Captured) -> None:
    with pytest.raises(ValueError, match=r"squat2 packs none of .*; it takes at least 1120$"):
        head_errors(captured, "squat2", {"W": 1024})


def test_the_damaged_head_is_named(captured: Captured) -> None:
    """Keys of one head with a large bias in one channel: per-token groups lose the channels next to it."""
    layer = captured.layers[1]
    key = layer.key.clone()
    key[:, 1, 5] += 300.0
    damaged = replace(captured, layers=(captured.layers[0], replace(layer, key=key)))
    before, after = (head_errors(c, "innerq2", {}) for c in (captured, damaged))
    # the bias itself is most of the score's size, so what is lost shows in the output
    worst = max(after, key=lambda e: e.output)
    assert (worst.layer, worst.head) == (3, 1)
    assert worst.output > 1.5 * max(e.output for e in before)
    assert after[:3] == before[:3]


def test_formats_see_the_layer_and_its_pairs(captured: Captured) -> None:
    other = replace(captured, pairing="interleaved", rotary_dim=32)
    geometry = bound(other, captured.layers[1], "polar4", {"N": 64}, 128).geometry
    assert (geometry.layer, geometry.pairing, geometry.rotary_dim, geometry.block_size) == (3, "interleaved", 32, 64)
    with pytest.raises(ValueError, match="needs to know which channels RoPE rotates together"):
        head_errors(replace(captured, pairing=None), "polar4", {})


def test_keys_and_values_have_their_own_windows(captured: Captured) -> None:
    layer = captured.layers[0]
    page = bound(captured, layer, "squat2", {"W": 64, "W_keys": 0, "S": 0}, 128)
    key_hat, value_hat = as_cached(page, layer.query[:250], layer.key[:250], layer.value[:250])
    # 7 groups of 32 keys are full; the newest 64 values are unchanged, and so is the rest of the group they begin in
    for hat, x, end in ((key_hat, layer.key, 224), (value_hat, layer.value, 160)):
        same = (hat == x[:250]).flatten(1).all(1)
        assert same[end:].all()
        assert not same[:end].any()


def test_keys_before_rope_are_those_of_the_model(captured: Captured) -> None:
    """The model's own rotation is undone: without it SQuat-pre is SQuat."""
    layer = captured.layers[0]
    page = bound(captured, layer, "squat2", PRE, 128)
    assert page.rope is captured.rope
    assert bound(captured, layer, "squat2", {}, 128).rope is None
    before, after = (sum(e.score for e in head_errors(captured, "squat2", options)) for options in (PRE, PLAIN))
    assert before < 0.95 * after
    with pytest.raises(ValueError, match="squat2 takes RoPE off keys, and this model has none, or several kinds"):
        head_errors(replace(captured, rope=None), "squat2", PRE)


def test_options_by_layer(captured: Captured) -> None:
    found = head_errors(captured, "qjl3", {"m": {"3": 1024, "*": 64}})
    few, many = (head_errors(captured, "qjl3", {"m": m}) for m in (64, 1024))
    assert [e for e in found if e.layer == 3] == [e for e in many if e.layer == 3]
    assert [e for e in found if e.layer != 3] == [e for e in few if e.layer != 3]
    with pytest.raises(ValueError, match="option 'm' names layer 99; the model has layers 0 to"):
        head_errors(captured, "qjl3", {"m": {"99": 1024, "*": 64}})


def test_layers_in_16_bits_have_no_error(captured: Captured) -> None:
    found = head_errors(captured, "squat2", {"skip_layers": [3]})
    assert [e.output > 0 for e in found] == [True, True, False, False]
    assert found[2] == HeadError(3, 0, 0.0, 0.0, 0.0)


def test_a_text_that_leaves_nobody_to_read_is_refused(captured: Captured) -> None:
    short = replace(
        captured.layers[0], **{n: getattr(captured.layers[0], n)[:READERS] for n in ("query", "key", "value")}
    )
    with pytest.raises(ValueError, match=f"a text of {READERS} tokens is too short"):
        head_errors(replace(captured, layers=(short,)), "squat2", {})


def test_calibrated_formats_are_fitted_to_the_other_text(captured: Captured) -> None:
    """Layer by layer, and not to the text that is measured."""
    with pytest.raises(ValueError, match="no other text was captured"):
        head_errors(captured, "oscar2", {})
    others = []
    for layer in captured.layers:
        query, key, value = attention_data(SIZE, 100, HEADS, GROUP, rope=True, seed=10 + layer.index)
        others.append(replace(layer, query=query, key=key, value=value))
    both = replace(captured, calibration=replace(captured, layers=tuple(reversed(others))))
    for layer, other in zip(captured.layers, others, strict=True):
        constants = bound(both, layer, "oscar2", {}, 128).geometry.constants
        want = get_format("oscar2").bind(Geometry(SIZE, 128, torch.float32))
        want = want.calibrated_on(Calibration(other.query, other.key, other.value))
        assert constants is not None
        assert constants.keys is not None
        assert torch.equal(constants.keys, want.geometry.constants.keys)  # type: ignore[union-attr, arg-type]
    assert all(e.output > 0 for e in head_errors(both, "oscar2", {"S": 4, "W": 32}))


def test_constants_are_fitted_once(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all texts; not for another layer, other options or another calibration."""
    fitted: list[tuple[Calibration, Mapping[str, Any]]] = []
    fit = OscarKeys.fit_constants

    def counted(calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        fitted.append((calibration, options))
        return fit(calibration, options)

    monkeypatch.setattr(OscarKeys, "fit_constants", counted)
    other = replace(captured, layers=captured.layers[::-1])
    first, last = captured.layers
    for calibration, layer, options, count in (
        (other, first, {}, 1),
        (other, first, {}, 1),
        (other, last, {}, 2),
        (other, last, {"oscar_rotation": "head"}, 3),
        (replace(other), last, {}, 4),
        (other, last, {}, 4),
    ):
        constants = bound(replace(captured, calibration=calibration), layer, "oscar2", options, 128).geometry.constants
        assert len(fitted) == count
        assert constants is not None
        assert constants.keys is not None
        want = fit(Calibration(layer.query, layer.key, layer.value), {"oscar_rotation": "layer", **options})
        assert torch.equal(constants.keys, want)


def test_formats_that_are_served_have_a_servers_constants(captured: Captured) -> None:
    """Layer by layer, of these options; and not those of the texts that others are fitted to."""
    asked: list[tuple[str, Mapping[str, Any]]] = []
    of_layer = {
        layer.index: Constants(TransformedKeys.fit_moments(Moments.of(layer.query * 2, layer.key + 1)), None)
        for layer in captured.layers
    }

    def of_server(name: str, options: Mapping[str, Any]) -> Mapping[int, Constants]:
        asked.append((name, options))
        return of_layer

    with pytest.raises(ValueError, match="the format takes its constants from a server, and none was asked"):
        head_errors(replace(captured, calibration=captured), "klt3", {})
    both, options = replace(captured, calibration=captured, of_server=of_server), {"key_rate": {"0": 2, "*": 3}}
    for layer in captured.layers:
        constants = bound(both, layer, "klt3", options, 128).geometry.constants
        assert constants is of_layer[layer.index]
    assert asked == [("klt3", options)] * 2


def test_layers_counted_from_the_last(captured: Captured) -> None:
    """A hybrid may have layers without attention after the last one that was captured."""
    exact = {e.layer for e in head_errors(captured, "kivi2", {"skip_layers": [-1]}) if e.score == 0}
    assert exact == {3}
    behind = replace(captured, total=6)
    assert not [e for e in head_errors(behind, "kivi2", {"skip_layers": [-1]}) if e.score == 0]
    assert {e.layer for e in head_errors(behind, "kivi2", {"skip_layers": [-3]}) if e.score == 0} == {3}

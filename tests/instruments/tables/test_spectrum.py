"""`python -m proof spectrum`: what it measures on made-up keys; what docs/how-it-works.md says was recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proof.pictures.explained import transform
from proof.tables.transformed import spectrum
from proof.tables.transformed.fitted import SINKS, fitted
from proof.tables.transformed.spectrum import BITS, Head, measured, middle, squares, write
from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.formats.constants import grouped
from vllm_kvq.formats.parts.rope import Rope

PAGE = (Path(__file__).parents[3] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
D, TOKENS, GROUP = 32, 300, 2


def text(seed: int, spread: torch.Tensor) -> Layer:
    """Two heads whose keys have these standard deviations; queries look everywhere."""
    rng = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(TOKENS, heads, D, generator=rng) for heads in (2 * GROUP, 2, 2))
    return Layer(5, query, key * spread + 3, value, D**-0.5)


def constants(*texts: Layer, rope: Rope | None = None) -> torch.Tensor:
    return fitted([Captured((layer,), (), None, None, rope) for layer in texts])[5]


def test_scores_are_those_of_earlier_keys() -> None:
    """Their squares, added up one by one."""
    layer = text(0, torch.ones(D))
    found = squares(grouped(layer.query[:7], 2), layer.key[:7].transpose(0, 1))
    for head in range(2):
        by_hand = sum(
            float(layer.query[t, head * GROUP + g] @ layer.key[s, head]) ** 2
            for t in range(7)
            for g in range(GROUP)
            for s in range(t + 1)
        )
        assert float(found[head]) == pytest.approx(by_hand, rel=1e-4)


def test_unequal_channels_gain_and_equal_ones_do_not() -> None:
    steep = list(measured(constants(text(0, torch.logspace(0, -2, D))), [text(1, torch.logspace(0, -2, D))]))
    flat = list(measured(constants(text(0, torch.ones(D))), [text(1, torch.ones(D))]))
    assert [(head.layer, head.head) for head, _ in steep] == [(5, 0), (5, 1)]
    for head, channels in steep:
        assert head.gain > 2
        assert sum(c.bits for c in channels) == BITS * D
        assert [c.bits for c in channels] == sorted((c.bits for c in channels), reverse=True)
        assert sum(c.variance for c in channels) == pytest.approx(1)
        # queries look everywhere, so the error that they see is that of scores
        for error, of_channels in ((head.equal, [c.equal for c in channels]),
                                   (head.by_channel, [c.by_channel for c in channels])):  # fmt: skip
            assert error == pytest.approx(sum(of_channels) ** 0.5, rel=0.2)
    # 2 and 4 bits are worse than 3 where all channels are alike
    assert all(head.gain < 1 for head, _ in flat)


def test_errors_are_relative_and_of_all_texts() -> None:
    """The same text twice changes nothing, and neither do larger queries; sinks are not looked at."""
    spread = torch.logspace(0, -2, D)
    calibration, other = text(0, spread), text(1, spread)
    (before, channels), *_ = measured(constants(calibration), [other])
    other.query[:] *= 10
    other.key[:SINKS] *= 1000
    (after, same), *_ = measured(constants(calibration), [other, other])
    assert after.equal == pytest.approx(before.equal, rel=1e-4)
    assert after.by_channel == pytest.approx(before.by_channel, rel=1e-4)
    assert same[0].by_channel == pytest.approx(channels[0].by_channel, rel=1e-4)


def test_the_mean_turns_in_each_text() -> None:
    """What RoPE made of a constant part of keys is taken off each text's slabs, from its own first token on."""
    spread, constant, rope = torch.logspace(0, -2, D), 30 * torch.ones(D), Rope.plain(D, TOKENS, 1e6)
    before, after = [], []
    for seed in range(3):
        layer = text(seed, spread)
        slab = 32 * (torch.arange(TOKENS) // 32) + 15
        before.append(layer)
        after.append(replace(layer, key=layer.key - 3 + rope.apply(constant.expand(TOKENS, 1, D), slab[:, None])))
    (plain, _), *_ = measured(constants(*before[:2]), before[2:])
    (turned, _), *_ = measured(constants(*after[:2], rope=rope), after[2:])
    (fixed, _), *_ = measured(constants(*after[:2]), after[2:])
    assert turned.by_channel * 3 < fixed.by_channel
    assert turned.by_channel < 1.2 * plain.by_channel


def test_the_middle_is_the_median() -> None:
    heads = [Head(0, i, gain, 1.0) for i, gain in enumerate((5.0, 1.0, 3.0, 2.0))]
    assert middle(heads) == heads[2]
    assert middle(heads[1:]) == heads[3]


def test_what_is_written_is_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((head, channels), *_) = measured(constants(text(0, torch.ones(D))), [text(1, torch.ones(D))])
    write(tmp_path / spectrum.HEADS, [head])
    write(tmp_path / spectrum.CHANNELS, channels)
    monkeypatch.setattr(transform, "RESULTS", tmp_path)
    (read,), read_channels = transform.data()
    assert (read.layer, read.head) == (5, 0)
    assert read.gain == pytest.approx(head.gain, rel=1e-3)
    assert [c.bits for c in read_channels] == [c.bits for c in channels]
    assert read_channels[3].equal == pytest.approx(channels[3].equal, rel=1e-3)
    assert read_channels[3].by_channel == pytest.approx(channels[3].by_channel, rel=1e-3)


def test_the_page_says_what_was_recorded() -> None:
    heads, channels = transform.data()
    shown, gains = middle(heads), sorted(head.gain for head in heads)
    assert len(channels) * BITS == sum(c.bits for c in channels)
    said = " ".join(PAGE.split())
    assert f"layer {shown.layer}, head {shown.head}" in said
    assert f"from {shown.equal:.3f} to {shown.by_channel:.3f}" in said
    assert f"{len(heads)} heads" in said
    assert f"{gains[0]:.2f} to {gains[-1]:.2f}" in said
    assert re.search(r"proof spectrum \S+ --sequences 1 --out docs/results", PAGE)

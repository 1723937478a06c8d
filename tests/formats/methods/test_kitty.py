"""Kitty: 2-bit keys, the widest channels of each slab in 4 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.methods.kitty import PARTS, BoostedKeys
from vllm_kvq.formats.parts.planes import unpack_keys


def keys(tokens: int = 32, d: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, tokens, d, generator=generator) * torch.exp(torch.randn(3, 1, d, generator=generator))


def codec(d: int = 64, **options: str) -> BoostedKeys:
    found = FORMATS["kitty2"].bind(Geometry(d, 64), options).keys
    assert isinstance(found, BoostedKeys)
    return found


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("part", PARTS)
def test_the_widest_channels_are_boosted(d: int, part: str) -> None:
    """As many as asked for, in whole quads of all four planes; their scales carry the sign."""
    x, k = keys(d=d), codec(d, boost=part)
    marked = k.pack(x, None)["k_scale"].squeeze(1) < 0
    assert k.boosted == -(-d // PARTS[part] // 16) * 16
    assert (marked.sum(-1) == k.boosted).all()
    span = x.amax(1) - x.amin(1)
    for head in range(3):
        assert span[head][marked[head]].min() >= span[head][~marked[head]].max()


@pytest.mark.parametrize("head", HEAD_SIZES)
@pytest.mark.parametrize("scales", ["range", "fitted"])
def test_each_channel_is_what_its_bits_give(head: int, scales: str) -> None:
    """Boosted channels read as 4-bit KIVI's, the others as 2-bit KIVI's."""
    k = codec(head, key_scales=scales)
    x = keys(64, k.d)
    fields = k.pack(x, None)
    boosted = (fields["k_scale"] < 0).repeat_interleave(32, dim=1)
    few, many = (FORMATS[f"kivi{bits}"].bind(Geometry(head, 64), {"key_scales": scales}).keys for bits in (2, 4))
    two, four = (plain.unpack(plain.pack(x, None)) for plain in (few, many))
    assert torch.equal(k.unpack(fields), torch.where(boosted, four, two))


def test_the_score_is_one_product_of_all_channels_and_one_of_the_boosted() -> None:
    """What kernels rely on: q . K = q . zero + (q scale) . low + (4 q scale of the boosted) . high."""
    k, x = codec(), keys()
    fields = k.pack(x, None)
    query = torch.randn(3, 64)
    scale, zero = (fields[name].float().squeeze(1) for name in ("k_scale", "k_zero"))
    low, high = (unpack_keys(fields[name], 2).float().squeeze(1) for name in ("k_codes", "k_high"))
    folded = query * scale.abs()
    boosted = folded[scale < 0].unflatten(0, (3, -1))
    score = (query * zero).sum(-1, keepdim=True) + torch.einsum("hd,htd->ht", folded, low)
    score = score + 4 * torch.einsum("hb,htb->ht", boosted, high)
    want = torch.einsum("hd,htd->ht", query, k.unpack(fields))
    assert torch.allclose(score, want, rtol=1e-4, atol=1e-3)


def test_none_boosted_is_refused() -> None:
    with pytest.raises(ValueError, match="option 'boost' is 'none': that is KIVI; use kivi2"):
        codec(boost="none")


def test_equal_channels_are_boosted_in_their_order() -> None:
    """Every device has to choose the same channels."""
    marked = codec().pack(torch.zeros(1, 32, 64), None)["k_scale"].flatten().signbit()
    assert marked.tolist() == [True] * 16 + [False] * 48


def test_the_padding_is_not_boosted() -> None:
    k = codec(80)
    x = torch.nn.functional.pad(keys(d=80), (0, 16))
    assert not k.pack(x, None)["k_scale"][..., 80:].signbit().any()


def test_bits_of_kivi_and_less_error() -> None:
    """At d = 64 `kitty2` stores as many bytes as `kivi2`, at d = 128 fewer."""
    assert FORMATS["kitty2"].bits_per_element(64) == FORMATS["kivi2"].bits_per_element(64)
    assert FORMATS["kitty2"].bits_per_element(128) < FORMATS["kivi2"].bits_per_element(128) - 0.1
    x, v = keys(96).transpose(0, 1).contiguous(), keys(96, seed=1).transpose(0, 1).contiguous()
    errors = [
        (roundtrip(name, x, v, **options)[0] - x).norm() / x.norm()
        for name, options in (("kivi2", {}), ("kitty2", {}), ("kitty2", {"boost": "half"}))
    ]
    assert all(np.diff(errors) < -0.1 * np.array(errors[1:])), errors

"""examples/int4_hadamard: its arithmetic. tests/engine/oracle/test_example_format.py serves and judges it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import example_format
import pytest
import torch

from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import Geometry
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.parts.quant import affine_codes, affine_parameters


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(example_format.SOURCE)
        import int4_hadamard

        yield int4_hadamard


@pytest.mark.parametrize("head", HEAD_SIZES)
@pytest.mark.parametrize("group", [16, 32])
def test_every_head_size(head: int, group: int, example: ModuleType) -> None:
    keys = example.INT4_HADAMARD.bind(Geometry(head, 64), {"hadamard_group": group}).keys
    rotation = example.hadamard(keys.d)
    assert torch.allclose(rotation @ rotation, torch.eye(keys.d), atol=1e-6)
    assert torch.equal(rotation, rotation.T)
    x, query = torch.randn(3, 64, keys.d), torch.randn(3, 5, keys.d)
    fields = keys.pack(x, None)
    hat = keys.unpack(fields)
    assert (hat - x).norm() < 0.1 * x.norm()
    scores = keys.query_features(query) @ keys.key_features(fields).mT
    assert torch.allclose(scores, query @ hat.mT, atol=1e-4)
    assert sum(f.nbytes for f in keys.slab_fields) == 32 * keys.d * 4 // 8 + 2 * 2 * 32 * keys.d // group


def test_the_rotation_pays(example: ModuleType) -> None:
    """On keys with outlier channels, against the same codes of keys that are not rotated."""
    query, key, _ = attention_data(128)
    keys = example.INT4_HADAMARD.bind(Geometry(128, 64)).keys
    rotated = keys.unpack(keys.pack(key.transpose(0, 1), None)).transpose(0, 1)
    grouped = key.unflatten(-1, (-1, 32))
    scale, zero = affine_parameters(grouped, -1, 4)
    plain = torch.addcmul(zero, affine_codes(grouped, scale, zero, 4), scale).flatten(-2)
    assert score_error(query, key, rotated) < 0.8 * score_error(query, key, plain)

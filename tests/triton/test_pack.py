"""The pack kernel against the PyTorch codec: the same bytes, but for SQuat's sums in another order."""

from __future__ import annotations

import pytest
import torch

from vllm_kvq.eval.packed_attention import outlier_data, state_for
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels import triton as kernels

H = 2


def packed(name: str, d: int, n: int, dtype: torch.dtype, **options: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(the reference's pages, the kernel's pages, where slabs begin): two slabs, one of them a padded entry."""
    fmt = get_format(name).bind(Geometry(d, n), options)
    key, value = (x.transpose(0, 1).to(dtype) for x in outlier_data(96, H, d, 0))
    key[3, 0, 5], value[4, 1, 6] = torch.nan, torch.inf
    state = state_for(fmt, key.float().nan_to_num(0).transpose(0, 1), 0)
    rows = torch.stack([torch.arange(32), torch.randperm(96, generator=torch.Generator().manual_seed(0))[:32]])
    page, slab = torch.tensor([2, 1]), torch.tensor([0, n // 32 - 1])
    want = torch.zeros(3, H, fmt.record_bytes, dtype=torch.uint8)
    got = want.clone()
    by_head = (fmt.widen(x[rows])[0].transpose(1, 2).flatten(0, 1) for x in (key, value))
    repeated = None if state is None else state.repeat(2, 1, 1)
    fmt.write(want, page, slab, fmt.encode(*by_head, repeated))
    padded = torch.tensor([2, 1, -1, 3]), torch.tensor([*slab.tolist(), 0, 0])
    wide = torch.cat([rows, rows])
    each = None if state is None else state.expand(4, *state.shape)
    kernels.pack(fmt, got, *padded, wide, key, value, each)
    return want, got, fmt.slabs_at


@pytest.mark.parametrize(
    ("name", "d", "n", "dtype"),
    [
        ("kivi2", 64, 64, torch.float32),
        ("kivi2", 96, 32, torch.bfloat16),
        ("kivi4", 128, 128, torch.float16),
        ("kivi2", 256, 64, torch.bfloat16),
    ],
)
def test_kivi_bytes_are_the_references(name: str, d: int, n: int, dtype: torch.dtype) -> None:
    want, got, _ = packed(name, d, n, dtype)
    assert torch.equal(want, got)


@pytest.mark.parametrize(("name", "d", "g"), [("squat2", 64, 32), ("squat2", 128, 32), ("squat4", 128, 64)])
def test_squat_bytes_agree_but_for_rounding(name: str, d: int, g: int) -> None:
    """A float32 sum in another order moves a value across a rounding boundary now and then."""
    want, got, at = packed(name, d, 64, torch.float32, g=g)
    assert torch.equal(want[..., :at], got[..., :at])
    assert (want != got).float().mean() < 2e-3

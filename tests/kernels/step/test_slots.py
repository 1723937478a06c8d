"""Where the parts of a sidecar lie: nothing overlaps, everything is inside its blocks, and no block is spare."""

from __future__ import annotations

import pytest
import torch

from vllm_kvq.formats import FORMATS, Geometry, get_format
from vllm_kvq.kernels.slots import HEADER_BYTES, SlotGeometry


def geometry(name: str, head: int, heads: int, spec: int = 0, dtype: torch.dtype = torch.bfloat16) -> SlotGeometry:
    return SlotGeometry.of(get_format(name).bind(Geometry(head, 128, dtype)), heads, spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", [0, 3])
@pytest.mark.parametrize("head", [64, 80, 128, 256])
def test_parts_fill_their_blocks(head: int, spec: int, dtype: torch.dtype) -> None:
    places = set()
    for name in (f.name for f in FORMATS.values() if f.public):
        at = geometry(name, head, 2, spec, dtype)
        blocks = torch.zeros(at.sidecar_blocks, at.page_bytes // at.itemsize, dtype=dtype)
        at.headers(blocks)[0] = 1
        assert blocks.count_nonzero() == 3  # of an int32 1, one of two halves is 0
        used = at.cut(blocks).flatten(0, 1).flatten(1).count_nonzero(1).nonzero().flatten().tolist()
        assert used == ([] if at.header_at else [0])
        assert at.state_bytes <= (at.ring_at - at.state_at) * at.slot_bytes
        assert 0 <= at.sidecar_blocks * at.slots_per_block - at.ring_at - at.ring < at.slots_per_block
        places.add(at.header_at > 0)
    assert True in places


def test_a_header_needs_no_block_of_its_own() -> None:
    """The ring of klt4, 64 tokens, fills two blocks of 32 slots, and 768 bytes are left behind them."""
    at = geometry("klt4", 128, 2)
    assert (at.slots_per_block, at.ring, at.sidecar_blocks) == (32, 64, 2)
    assert at.header_at == 32 * at.slot_bytes == at.page_bytes - 768


def test_a_page_of_whole_slots_keeps_its_header_in_the_first() -> None:
    at = geometry("innerq2", 64, 2)
    assert at.page_bytes == at.slots_per_block * at.slot_bytes
    assert (at.header_at, at.state_at, at.ring_at) == (0, 1, 2)
    almost = SlotGeometry(2, 64, 2, at.page_bytes + HEADER_BYTES - 4, at.ring, 0, 0)
    just = SlotGeometry(2, 64, 2, at.page_bytes + HEADER_BYTES, at.ring, 0, 0)
    assert (almost.header_at, just.header_at) == (0, at.page_bytes)

"""Random pages, headers, tables and lengths through the decode step: it serves or refuses them, and touches nothing
outside its tensors. `test_cpu_sanitizers.py` runs this file under the address sanitizer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_fuzzing import CASES, bound, fuzz, shapes
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPUStep
from vllm_kvq.kernels.slots import MAGIC, SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
INT32 = st.sampled_from([-(1 << 31), -40, -1, 0, 1 << 20, (1 << 31) - 1])


@pytest.mark.parametrize("case", CASES, ids=str)
@fuzz
@given(data=st.data())
def test_any_batch(isa: int, case: tuple[str, Any], data: st.DataObject) -> None:
    s = shapes(data.draw, case)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    fmt = bound(*case, s["d"], s["N"], dtype, s["heads"])
    drafts = data.draw(st.integers(0, 2))
    slots = SlotGeometry.of(fmt, s["heads"], drafts)
    rng = torch.Generator().manual_seed(s["seed"])
    n, blocks = s["requests"], 3 * slots.sidecar_blocks + 12
    pages = torch.randint(0, 256, (blocks, s["heads"], fmt.record_bytes), dtype=torch.uint8, generator=rng)
    elements = slots.page_bytes // dtype.itemsize
    side = torch.randint(0, 256, (blocks, slots.page_bytes), dtype=torch.uint8, generator=rng).view(dtype)
    sinks = torch.zeros(blocks if fmt.S else 0, elements, dtype=dtype)

    def number(valid: st.SearchStrategy[int], wild: bool) -> int:
        return data.draw(st.one_of(valid, INT32) if wild else valid)

    wild = data.draw(st.sampled_from(["", "", "", "header", "lengths", "side", "pages", "starts"]))
    new = [number(st.integers(0, 1 + drafts), wild == "starts") for _ in range(n)]
    context = [data.draw(st.integers(0, 6 * fmt.N)) for _ in range(n)]
    ids = torch.randperm(blocks - 1, generator=rng)[: n * slots.sidecar_blocks].add(1).view(n, -1).to(torch.int32)
    for row, c in zip(ids.tolist(), context, strict=True):
        own = c // fmt.unit * fmt.unit
        start = data.draw(st.sampled_from([0, own]))
        header = [MAGIC, number(st.just(start), wild == "header"), number(st.just(c), wild == "header")]
        slots.headers(side)[row[0]] = torch.tensor(header, dtype=torch.int32)
    # packed pages, so that not every batch fails at the first one
    pages[:, :, :4] = torch.tensor([0x4B, 0x56, 0x51, 0x31], dtype=torch.uint8)
    pages[:, :, 16 : 16 + fmt.slabs] = 1
    table = torch.randint(1, blocks, (n, 8), generator=rng, dtype=torch.int32)
    sink_table = torch.randint(1, blocks, (n, max(1, slots.sink_blocks)), generator=rng, dtype=torch.int32)
    if wild in ("side", "pages"):
        (ids if wild == "side" else table)[-1, -1] = data.draw(INT32)
    seq = torch.tensor([number(st.just(c + q), wild == "lengths") for c, q in zip(context, new, strict=True)]).int()
    tokens = sum(max(q, 0) for q in new if q < 100) + 1
    begin = torch.tensor([0, *new]).cumsum(0).int()
    query = torch.randn(tokens, s["heads"] * s["group"], s["d"], generator=rng).to(dtype)
    key, value = (torch.randn(tokens, s["heads"], s["d"], generator=rng).to(dtype) for _ in range(2))
    step = CPUStep(fmt, slots, drafts, 0.1)
    batch = StepBatch(begin, begin, seq, table, ids, sink_table, max(new))
    before = pages.clone(), side.clone()
    output = torch.full_like(query, 7.0)
    try:
        served = step.decode(batch, Caches(pages, side, sinks), query, key, value, output)
    except (IndexError, RuntimeError):
        if not wild:
            raise
        return
    if served is None:
        assert torch.equal(pages, before[0])
        assert torch.equal(side.view(torch.uint8), before[1].view(torch.uint8))
        assert output.eq(7).all()
    elif not wild:
        rows = [r for a, q in zip(begin.tolist()[:-1], new, strict=True) for r in range(a, a + q)]
        assert sorted(set(range(tokens)) - set(rows)) == [r for r in range(tokens) if output[r].eq(7).all()]

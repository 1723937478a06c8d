"""A decode step in one C++ call (packed pages and full-precision tokens) against the PyTorch kernels in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_each import METHODS

from proof.kernels.exact import relative_error
from vllm_kvq.bench.pools import calibrated, random_pages
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.page import FLAGS_AT
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.lists import PageList, TokenList

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("isa"),
]
HEADS, GQA, D, PAGES = 2, 4, 128, 5


@dataclass
class Step:
    """Four requests: pages and tokens, only tokens, only pages, nothing at all."""

    fmt: PageFormat
    query: torch.Tensor
    pages: torch.Tensor
    listed: PageList
    held: TokenList

    def run(self, kernels: Any) -> tuple[bool, torch.Tensor]:
        output = torch.full((2 * len(self.query) * self.query.shape[1], HEADS * GQA, D), 7.0, dtype=self.query.dtype)
        rows = 2 * torch.arange(len(output) // 2).view(self.query.shape[:2])
        done = kernels.attend_step(self.fmt, output, rows, self.query, self.pages, self.listed, self.held, D**-0.5)
        return done, output


def step(name: str, q: int, dtype: torch.dtype = torch.float32) -> Step:
    rng = torch.Generator().manual_seed(q)
    fmt = calibrated(get_format(name).bind(Geometry(D, 64, dtype)), HEADS)
    tokens = torch.randn(2, 9, 8, HEADS, D, generator=rng).to(dtype)
    rows = torch.randperm(72, generator=rng)[: 4 * 17].view(4, 17)
    rows[0, :3], rows[2], rows[3] = -1, -1, -1
    seen = torch.rand(4, q, 17, generator=rng) < 0.8
    seen[:2, :, 5] = True
    pool, more = (tokens[0, :6], tokens[1, :6]), (tokens[0, 6:], tokens[1, 6:])
    lists = [[1, 4, 2, 5], [0, 0, 2, 2], [3, 0, 0, 10], [64, 61, 64, 64]]
    return Step(
        fmt,
        torch.randn(4, q, HEADS * GQA, D, generator=rng).to(dtype),
        random_pages(fmt, PAGES, HEADS),
        PageList(*(torch.tensor(x) for x in lists)),
        TokenList(pool, more, rows, seen),
    )


@pytest.mark.parametrize("q", [1, 3, 20])
@pytest.mark.parametrize("name", METHODS)
def test_one_call_is_all_parts_merged(name: str, q: int) -> None:
    s = step(name, q)
    (got_done, got), (want_done, want) = s.run(cpu), s.run(attend)
    assert got_done
    assert want_done
    some = slice(0, 2 * 3 * q, 2)
    assert relative_error(got[some], want[some].double()) < (1e-2 if name == "qjl3" else 1e-3)
    assert not got[2 * 3 * q :: 2].any()  # the request that sees nothing
    assert got[1::2].eq(7).all()  # rows that no query names


def test_of_another_type() -> None:
    s = step("kivi2", 2, torch.bfloat16)
    got, want = s.run(cpu)[1], s.run(attend)[1]
    assert relative_error(got[:12], want[:12].double()) < 1e-2


def test_an_unpacked_page_is_not_attended() -> None:
    s = step("kivi2", 1)
    s.listed.ids[2] = 0
    for kernels in (cpu, attend):
        done, output = s.run(kernels)
        assert not done
        assert output.eq(7).all()


@pytest.mark.parametrize("kernels", [cpu, attend], ids=["C++", "PyTorch"])
@pytest.mark.parametrize(
    ("empty", "low", "high", "packed"),
    [(0, 32, 64, True), (0, 31, 64, False), (0, 0, 1, False), (1, 0, 32, True), (1, 0, 33, False), (1, 63, 64, False)],
)
def test_each_slab_with_an_attended_token_must_be_packed(
    kernels: Any, empty: int, low: int, high: int, packed: bool
) -> None:
    fmt = get_format("kivi2").bind(Geometry(D, 64, torch.float32))
    pages = random_pages(fmt, 2, HEADS)
    pages[2, :, FLAGS_AT + empty] = 0
    listed = PageList(*(torch.tensor(x) for x in ([1, 2], [0, 0], [0, low], [64, high])))
    assert kernels.all_packed(fmt, pages, listed) == packed


@pytest.mark.parametrize(("column", "bad"), [(0, 6), (0, -1), (1, 4), (1, -1)])
def test_a_page_or_owner_out_of_range(column: int, bad: int) -> None:
    s = step("kivi2", 1)
    s.listed[column][1] = bad
    with pytest.raises(IndexError):
        s.run(cpu)


def test_a_row_out_of_range() -> None:
    s = step("kivi2", 1)
    s.held.rows[1, 4] = 72
    with pytest.raises(IndexError):
        s.run(cpu)

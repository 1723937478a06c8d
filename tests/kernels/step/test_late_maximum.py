"""Rising scores and a maximum in the first, a middle or the last block: every kernel, every instruction set."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch
from cpu_fuzzing import IN_CPP
from rising import decode_error, exact, rising, stands_out, unpacked

from proof.kernels.exact import relative_error
from vllm_kvq.bench.pools import pages_of
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPU, CPUStep
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.lists import PageList, TokenList
from vllm_kvq.kernels.torch.step import PlannedStep

FORMATS = [name for name in IN_CPP if not get_format(name).keys.calibrated]
"""With constants that are fitted to other data the peak would not stand out."""
D, N, PAGES, HEADS, SHARE = 128, 64, 10, 2, 4
TOKENS, SCALE = N * PAGES, D**-0.5
PEAKS = (3, 330, TOKENS - 1)

needs_cpp = pytest.mark.skipif(library() is None, reason="no C++ compiler")
Case = tuple[PageFormat, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def bound(name: str) -> float:
    return 1e-2 if name == "qjl3" else 1e-3


@functools.cache
def case(name: str, peak: int) -> Case:
    """The format, 100 queries, pages, and all tokens' keys and values as they are read back."""
    fmt = get_format(name).bind(Geometry(D, N, torch.float32))
    query, key, value = rising(HEADS, TOKENS, peak, SHARE, 100, D)
    pages = pages_of(fmt, key, value)
    key, value = unpacked(fmt, pages, torch.arange(1, PAGES + 1))
    assert stands_out(query, key, peak, SCALE)
    return fmt, query, pages, key, value


def listed(pages: int) -> PageList:
    zero = torch.zeros(pages, dtype=torch.int64)
    return PageList(torch.arange(1, pages + 1), zero, zero, zero + N)


def check_packed(kernels: ModuleType, name: str) -> None:
    """One query, as in a decode step, and a chunk's hundred."""
    for peak in PEAKS:
        fmt, query, pages, key, value = case(name, peak)
        want, want_lse = exact(query, key, value, SCALE)
        for q in (1, 100):
            out, lse = kernels.attend_packed(fmt, query[None, :q], pages, listed(PAGES), SCALE)
            assert relative_error(out[0], want[:q]) < bound(name), f"peak {peak}, {q} queries"
            assert (lse[0] - want_lse[:q]).abs().max() < 20 * bound(name)


def check_step(kernels: ModuleType, name: str) -> None:
    """Five pages and 70 tokens in full precision, in two pools, of which each part holds the peak in turn."""
    packed = 5 * N
    for peak in (3, packed - 1, packed, packed + 40, packed + 69):
        fmt = get_format(name).bind(Geometry(D, N, torch.float32))
        query, key, value = rising(HEADS, packed + 70, peak, SHARE, 3, D, seed=1)
        pages = pages_of(fmt, key[:, :packed], value[:, :packed])
        tokens = [x[:, packed:].transpose(0, 1).unflatten(0, (7, 10)) for x in (key, value)]
        pool, more = ([x[part] for x in tokens] for part in (slice(0, 3), slice(3, 7)))
        read = unpacked(fmt, pages, torch.arange(1, 6))
        key, value = (torch.cat([a, b[:, packed:]], 1) for a, b in zip(read, (key, value), strict=True))
        for q in (1, 3):
            output = torch.zeros(q, HEADS * SHARE, D)
            seen = torch.ones(1, q, 70, dtype=torch.bool)
            held = TokenList((pool[0], pool[1]), (more[0], more[1]), torch.arange(70)[None], seen)
            rows = torch.arange(q)[None]
            assert kernels.attend_step(fmt, output, rows, query[None, :q], pages, listed(5), held, SCALE)
            assert relative_error(output, exact(query[:q], key, value, SCALE)[0]) < bound(name), f"peak {peak}"


def check_full_precision(kernels: ModuleType, dtype: torch.dtype) -> None:
    for peak in (3, 100, 199):
        query, key, value = (x.to(dtype) for x in rising(HEADS, 200, peak, SHARE, 20, D, seed=2))
        want, want_lse = exact(query, key, value, SCALE)
        for q in (1, 2, 20):
            seen = torch.ones(1, q, 200, dtype=torch.bool)
            tokens = (x.transpose(0, 1)[None] for x in (key, value))
            out, lse = kernels.attend_raw(query[None, :q], *tokens, seen, SCALE)
            assert relative_error(out[0], want[:q]) < 1e-4, f"peak {peak}, {q} queries"
            assert (lse[0] - want_lse[:q]).abs().max() < 1e-3


def check_merge(kernels: ModuleType) -> None:
    """Full-precision tokens with two other parts, each of which is 20 nats above the rest in turn."""
    query, key, value = rising(HEADS, 40, 0, SHARE, 2, D, seed=3)
    out, lse = exact(query, key, value, SCALE)
    rng = torch.Generator().manual_seed(4)
    others = [torch.randn(1, 2, HEADS * SHARE, D, generator=rng) for _ in range(2)]
    tokens = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    none = tokens[0][:0], tokens[1][:0]
    for above in ((-20, -22), (20, 0), (0, 20), (-20, 20), (20, 18)):
        parts = [(o, (lse[None] + rise).float()) for o, rise in zip(others, above, strict=True)]
        weight = torch.stack([lse, *(x[0].double() for _, x in parts)]).softmax(0)[..., None]
        want = weight[0] * out + weight[1] * others[0][0] + weight[2] * others[1][0]
        got = torch.zeros(2, HEADS * SHARE, D)
        seen = torch.ones(1, 2, 40, dtype=torch.bool)
        held = TokenList(tokens, none, torch.arange(40)[None], seen)
        kernels.attend_into(got, torch.arange(2)[None], query[None], held, SCALE, parts)
        assert relative_error(got, want) < 1e-4, above


@needs_cpp
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", FORMATS)
class TestCpp:
    def test_packed_pages(self, name: str) -> None:
        check_packed(cpu, name)

    def test_pages_and_tokens(self, name: str) -> None:
        check_step(cpu, name)

    def test_a_decode_step(self, name: str) -> None:
        assert decode_error(name, D, CPUStep, CPU) < bound(name)


@needs_cpp
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cpp_full_precision(dtype: torch.dtype) -> None:
    check_full_precision(cpu, dtype)


@needs_cpp
def test_cpp_merge() -> None:
    check_merge(cpu)


@pytest.mark.parametrize("name", FORMATS)
def test_pytorch(name: str) -> None:
    check_packed(attend, name)
    check_step(attend, name)
    assert decode_error(name, D, PlannedStep) < 1e-4


def test_pytorch_full_precision() -> None:
    check_full_precision(attend, torch.float32)
    check_merge(attend)


def test_pytorch_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pages at a time, whose parts are merged."""
    monkeypatch.setattr(attend, "WORK_BYTES", 1 << 20)
    check_packed(attend, "squat2")

"""A decode step planned and done in one C++ call, compared with one planned on the host, with the same kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_fuzzing import IN_CPP
from traffic import SPEC, Request, World, simulate

from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.integration.worker.companions import Sidecar, Sinks
from vllm_kvq.integration.worker.layer import PackedLayer
from vllm_kvq.kernels.cpu import layout
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPUStep
from vllm_kvq.kernels.step import StepBatch
from vllm_kvq.kernels.torch.step import Planned

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


class InOneCall:
    """A step that decodes in one call, and plans only what needs a plan."""

    exact = True

    def __init__(self, world: World) -> None:
        fmt, self.world = world.fmt, world
        self.step = CPUStep(fmt, world.slots, SPEC, world.scale)
        slots = world.slots
        served: Any = SimpleNamespace(
            sidecar_blocks=slots.sidecar_blocks, sink_blocks=slots.sink_blocks, copies=1, page_bytes=slots.page_bytes
        )
        sidecar, sinks = Sidecar(fmt, slots, served), Sinks(fmt, slots, served) if fmt.S else None
        sidecar.bind_kv_cache(world.side[1])
        if sinks is not None:
            sinks.bind_kv_cache(world.sinks[1])
        self.layer = PackedLayer(fmt, "layer", world.scale, sidecar, sinks, self.step)
        self.decoded = 0

    def run(self, batch: StepBatch, *tensors: torch.Tensor) -> None:
        self.layer.run(batch, *tensors[:3], self.world.pages[1], tensors[3])
        self.decoded += Planned not in batch.kept

    def check_padding(self, output: torch.Tensor) -> None:
        assert output.isnan().all()


CASES = [
    ("lossless", 64, 64, torch.float32, {"W": 32, "S": 5}),
    ("squat2", 64, 32, torch.float32, {"W": 32, "S": 0}),
    ("kivi2", 80, 64, torch.float32, {"W": 32, "S": 5}),
    ("innerq2", 128, 64, torch.bfloat16, {"W": 32, "S": 40}),
    ("kitty2", 128, 64, torch.bfloat16, {"W": 32, "S": 5}),
    ("polar4", 64, 32, torch.float16, {"W": 32, "S": 0}),
    ("polar3", 64, 32, torch.bfloat16, {"W": 64, "mode": "paper"}),
    ("qjl3", 64, 32, torch.float32, {"W": 32}),
    ("squat4", 128, 64, torch.bfloat16, {"W": 64, "S": 64}),
    ("klt2", 128, 64, torch.bfloat16, {"W": 32, "S": 5}),
    ("klt3", 64, 32, torch.float32, {"W": 32, "S": 0}),
    ("klt4", 80, 64, torch.float16, {"W": 64}),
]


def served(name: str, d: int, n: int, dtype: torch.dtype, seed: int = 0, **options: object) -> World:
    """Random traffic, and then nothing but decoding."""
    world = simulate(InOneCall, name, d, n, dtype, seed, **options)
    before = world.other.decoded
    for step in range(world.fmt.unit + 2):  # every request completes a unit
        world.check(*world.run(world.requests, 64, padded=step % 2))
    assert world.other.decoded == before + world.fmt.unit + 2
    return world


@pytest.mark.parametrize(("name", "d", "n", "dtype", "options"), CASES)
def test_random_traffic(name: str, d: int, n: int, dtype: torch.dtype, options: dict[str, object]) -> None:
    served(name, d, n, dtype, **options)


@pytest.fixture(scope="module")
def decoding() -> World:
    return served("squat2", 64, 32, torch.float32, W=32, S=5)


def inputs(world: World, requests: list[Request]) -> tuple[StepBatch, tuple[torch.Tensor, ...]]:
    n = len(requests)
    start = torch.arange(n + 1, dtype=torch.int32)
    seq = torch.tensor([r.tokens + 1 for r in requests], dtype=torch.int32)
    tables = [world.table([getattr(r, x) for r in requests], 0) for x in ("pages", "side", "sinks")]
    new = world.data(requests, [1] * n)
    return StepBatch(start, start, seq, *tables, 1), (*new[:3], world.pages[1], torch.full_like(new[0], 7.0))


def snapshot(world: World) -> list[torch.Tensor]:
    return [x.clone() for x in (world.side[1], world.sinks[1].nan_to_num(), world.pages[1])]


def test_a_new_request_and_a_chunk_are_left_alone(decoding: World) -> None:
    batch, tensors = inputs(decoding, decoding.requests)
    before, step = snapshot(decoding), decoding.other.step
    caches, tensors = decoding.caches(1), (*tensors[:3], tensors[-1])
    fresh = batch.side_table.clone()
    fresh[-1, : decoding.slots.sidecar_blocks] = torch.tensor(decoding.take(decoding.slots.sidecar_blocks, True))
    assert step.decode(replace(batch, side_table=fresh), caches, *tensors) is None
    longer, seq = batch.query_start.clone(), batch.seq_lens.clone()
    longer[-1] += SPEC + 1
    seq[-1] += SPEC + 1
    assert step.decode(replace(batch, query_start=longer, seq_lens=seq), caches, *tensors) is None
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(decoding), strict=True))
    assert tensors[-1].eq(7).all()


@pytest.mark.parametrize(
    ("field", "at", "bad", "error", "words"),
    [
        ("seq_lens", 1, 5, RuntimeError, "layer: stale sidecar: magic 0x4b565153"),
        ("side_table", (0, 1), 0, RuntimeError, "incomplete sidecar"),
        ("side_table", (0, 0), 300, IndexError, "sidecar block 300 is not one of 300"),
        ("side_table", (1, 0), -4, IndexError, "sidecar block -4"),
        ("table", (0, 0), 300, IndexError, "page id 300"),
        ("sink_table", (0, 0), 4000, IndexError, "sink block 4000"),
        ("query_start", -1, 900, IndexError, "leave the step's tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    decoding: World, field: str, at: int | tuple[int, int], bad: int, error: type[Exception], words: str
) -> None:
    batch, tensors = inputs(decoding, decoding.requests)
    wrong = getattr(batch, field).clone()
    wrong[at] = bad
    batch = replace(batch, **{field: wrong})
    if field == "query_start":
        # few new tokens, but of rows that do not exist
        wrong[-2] = bad - 1
        batch = replace(batch, query_start=wrong[-2:], seq_lens=batch.seq_lens[-1:], table=batch.table[-1:])
        batch = replace(batch, side_table=batch.side_table[-1:], sink_table=batch.sink_table[-1:])
    before = snapshot(decoding)
    with pytest.raises(error, match=words):
        decoding.other.layer.run(batch, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(decoding), strict=True))
    assert tensors[-1].eq(7).all()


def test_a_page_that_was_never_packed(decoding: World) -> None:
    batch, tensors = inputs(decoding, decoding.requests)
    empty = decoding.take(1, False)[0]
    table = batch.table.clone()
    table[0, 1] = empty
    with pytest.raises(RuntimeError, match="never packed"):
        decoding.other.layer.run(replace(batch, table=table), *tensors)


def test_geometry_must_fit() -> None:
    fmt = get_format("kivi2").bind(Geometry(64, 64, torch.float32), {"W": 32})
    world = World(fmt, 0, InOneCall)
    world.requests = [world.admit(70)]
    world.run(world.requests, 80)
    batch, (query, key, value, pages, out) = inputs(world, world.requests)
    layer = world.other.layer
    with pytest.raises(ValueError, match="out has the wrong shape"):
        layer.run(batch, query, key, value, pages, out[:0])
    with pytest.raises(ValueError, match="different tokens"):
        layer.run(batch, query, key[:0], value[:0], pages, out)


@pytest.mark.parametrize("name", IN_CPP)
def test_tables_do_not_follow_the_default_type(name: str) -> None:
    """vLLM makes its layers, and with them our steps, while PyTorch's default type is the model's."""
    fmt = calibrated(get_format(name).bind(Geometry(64, 64, torch.bfloat16), {}), 2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        bound = layout.lay_out(fmt, layout.Names.of(library()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert bound is not None
    assert torch.equal(bound, layout.bind(fmt))

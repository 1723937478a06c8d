"""The GPU's step, under Triton's interpreter, compared with one planned on the host in C++ (layers/traffic.py)."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from traffic import SPEC, World, simulate

from proof.kernels.exact import relative_error
from proof.kernels.step_traffic import StepTraffic
from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch

wide = functools.partial(pytest.param, marks=pytest.mark.wide)


class OnGPU:
    exact = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.step = GPUStep(world.fmt, world.slots, SPEC, world.scale, torch.device("cpu"))

    def run(self, batch: StepBatch, *tensors: torch.Tensor) -> None:
        assert self.step.run(batch, self.world.caches(1), *tensors) == 0

    def check_padding(self, output: torch.Tensor) -> None:
        assert (output == 0).all()


@pytest.mark.parametrize(
    ("name", "d", "n", "dtype", "options"),
    [
        ("polar4", 64, 32, torch.float32, {"W": 32, "S": 0}),
        ("qjl3", 64, 32, torch.float32, {"W": 32}),
        wide("qjl3", 64, 64, torch.bfloat16, {"W": 64, "outlier_choice": "slab", "S": 5}),
        # polar3 also runs as compiled (tests/ptx); squat2 is in the tests below
        wide("squat2", 64, 32, torch.float32, {"W": 32}),
        wide("innerq2", 64, 32, torch.float32, {"W": 32, "S": 20}),
        wide("polar3", 64, 32, torch.bfloat16, {"W": 64, "mode": "paper"}),
        wide("klt3", 64, 32, torch.float32, {"W": 32, "S": 5}),
        wide("kivi2", 64, 64, torch.float32, {"W": 32, "S": 5}),
        wide("squat4", 64, 32, torch.float32, {"key_scales": "fitted", "value_rotation": "hadamard"}),
        wide("kitty2", 96, 64, torch.bfloat16, {"W": 32, "S": 5}),
    ],
)
def test_random_traffic(name: str, d: int, n: int, dtype: torch.dtype, options: dict[str, object]) -> None:
    world = simulate(OnGPU, name, d, n, dtype, **options)
    assert not int(world.other.step.faults[0])


def test_copies_of_a_kv_head_stay_equal() -> None:
    """Two ranks with copies of one KV head, each with two of its four query heads, and one process with all four."""
    fmt = get_format("squat2").bind(Geometry(64, 32, torch.float32), {"W": 32, "S": 0})
    slots, scale = SlotGeometry.of(fmt, 1, 0), 0.125
    each = 5 + slots.sidecar_blocks
    ids = torch.arange(1, 1 + 2 * each, dtype=torch.int32).view(2, each)
    everyone = [StepWorld(fmt, slots, ids, scale) for _ in range(3)]
    rng = torch.Generator().manual_seed(0)
    seq = torch.zeros(2, dtype=torch.int32)
    for counts in ((1, 70), (1, 1)):  # a prompt of one token comes first, as a decode step does
        query = torch.randn(sum(counts), 4, 64, generator=rng)
        key, value = (torch.randn(sum(counts), 1, 64, generator=rng) for _ in range(2))
        start = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        seq = seq + torch.tensor(counts, dtype=torch.int32)
        batch = StepBatch(start, start, seq, ids[:, :5].contiguous(), ids[:, 5:].contiguous(), None, max(counts))
        whole = everyone[0].run(batch, query, key, value, query)
        halves = [w.run(batch, query[:, 2 * i : 2 * i + 2], key, value, query) for i, w in enumerate(everyone[1:])]
        assert relative_error(torch.cat(halves, 1), whole.double()) < 1e-3
    caches = [w.caches for w in everyone]
    assert caches[0].pages.any()
    for other in caches[1:]:
        assert torch.equal(other.pages, caches[0].pages)
        assert torch.equal(other.sidecar, caches[0].sidecar)


def prompt(fmt: PageFormat, query: torch.Tensor, key: torch.Tensor) -> tuple[StepWorld, torch.Tensor]:
    """A request's first step, and its blocks."""
    slots = SlotGeometry.of(fmt, 1, 0)
    ids = torch.arange(1, 6 + slots.sidecar_blocks, dtype=torch.int32)[None]
    world = StepWorld(fmt, slots, ids, 0.1)
    start = torch.tensor([0, len(key)], dtype=torch.int32)
    batch = StepBatch(start, start, start[1:], ids[:, :5].contiguous(), ids[:, 5:].contiguous(), None, len(key))
    world.run(batch, query, key, key, query)
    return world, ids[0].long()


def test_subspace_and_noise_of_one_token() -> None:
    """The kernel finds them where a prompt is as short as a decode step."""
    fmt = get_format("squat2").bind(Geometry(80, 32, torch.float32), {"W": 32, "S": 0, "r": 2})
    query = torch.randn(1, 4, 80, generator=torch.Generator().manual_seed(0)) * torch.tensor([8.0, 4, 2, 1])[:, None]
    world, ids = prompt(fmt, query, query[:, :1])
    slots = world.step.slots
    at = torch.arange(slots.state_at, slots.ring_at)
    block = ids[5:][at // slots.slots_per_block]
    found = slots.read_state(slots.cut(world.caches.sidecar), block[None], (at % slots.slots_per_block)[None], 3)[0]
    want = fmt.keys.fit(fmt.widen(query)[0], fmt.widen(query[:, :1])[0], None)
    assert relative_error(found[:, 2], want[:, 2].double()) < 1e-4
    (got, u) = (x[:, :2].transpose(1, 2) @ x[:, :2] for x in (found, want))
    assert relative_error(got, u.double()) < 1e-4


@pytest.mark.parametrize("options", [{}, {"boost": "none"}], ids=["boosted", "plain"])
def test_a_corrected_key_is_finite_in_float16(options: dict[str, str]) -> None:
    """Near the clamp a correction points beyond it."""
    fmt = get_format("squat2").bind(Geometry(64, 64, torch.float32), {"W": 32, "S": 0, "r": 16, "g": 16, **options})
    rng = torch.Generator().manual_seed(4)
    key = 32768 * torch.rand(64, 1, 64, generator=rng)
    query = 100 * torch.randn(64, 1, 16, generator=rng) @ torch.randn(16, 64, generator=rng) * torch.logspace(1, -1, 64)
    world, ids = prompt(fmt, query, key)
    hat = fmt.unpack(fmt.read(world.caches.pages, ids[:1]))[0]
    assert hat.any()
    assert hat.half().isfinite().all()


class StepWorld:
    """Without sinks."""

    def __init__(self, fmt: PageFormat, slots: SlotGeometry, ids: torch.Tensor, scale: float) -> None:
        blocks = 1 + ids.numel()
        pages = torch.zeros(blocks, 1, fmt.record_bytes, dtype=torch.uint8)
        self.caches = Caches(pages, torch.zeros(blocks, slots.page_bytes // 4), None)
        self.step = GPUStep(fmt, slots, 0, scale, torch.device("cpu"), None, lambda query: self.everyone)

    def run(
        self, batch: StepBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, everyone: torch.Tensor
    ) -> torch.Tensor:
        self.everyone = everyone
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.step.run(batch, self.caches, query, key, value, out)
        return out


@pytest.mark.parametrize(("name", "options"), [("squat2", {"floor": 64}), ("klt3", {})])
def test_against_the_reference_cache(name: str, options: dict[str, int]) -> None:
    """What tests/gpu runs on a device, with a floor that is above 1 / lambda."""
    fmt = get_format(name).bind(Geometry(64, 32, torch.float32), {"W": 32, **options})
    traffic = StepTraffic(calibrated(fmt, 2), torch.device("cpu"))
    traffic.prompts((75, 1))
    traffic.decode(3)
    assert 0 < traffic.worst < 1e-3
    assert not int(traffic.step.faults[0])

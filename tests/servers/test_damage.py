"""Damaged keys and values give a warning, and a sidecar of other tokens stops the engine: on every path."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.integration.worker import report
from vllm_kvq.integration.worker.backend import KVQMetadataBuilder
from vllm_kvq.integration.worker.companions import Sidecar
from vllm_kvq.integration.worker.faults import FaultWatch
from vllm_kvq.integration.worker.layer import PackedLayer
from vllm_kvq.integration.worker.report import Damage
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.paths import Wish, path_for, step_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import StepBatch

pytestmark = pytest.mark.engine
H, D, N = 2, 64, 32
WISHES = {
    "C++": Wish("cpu"),
    "PyTorch": Wish("cpu", "torch"),
    "GPU/Triton": Wish("cpu", "torch", gpu_path=True),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Our warnings."""
    lines: list[str] = []
    monkeypatch.setattr(report.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


class Requests:
    """Two requests of a layer, each in its own blocks."""

    def __init__(self, path: str) -> None:
        fmt = get_format("kivi2").bind(Geometry(D, N, torch.float32), {"W": 0, "S": 0})
        self.slots = SlotGeometry.of(fmt, H, 0)
        chosen = path_for(fmt, WISHES[path])
        assert chosen.name == path
        step = step_for(chosen, fmt, self.slots, 0, D**-0.5, torch.device("cpu"))
        each = 4 + self.slots.sidecar_blocks
        self.ids = torch.arange(1, 1 + 2 * each, dtype=torch.int32).view(2, each)
        blocks = 1 + self.ids.numel()
        served: Any = SimpleNamespace(
            sidecar_blocks=self.slots.sidecar_blocks,
            sink_blocks=self.slots.sink_blocks,
            copies=1,
            page_bytes=self.slots.page_bytes,
        )
        sidecar = Sidecar(fmt, self.slots, served)
        sidecar.bind_kv_cache(torch.zeros(blocks, self.slots.page_bytes // 4))
        self.layer = PackedLayer(fmt, "layers.7.attn", D**-0.5, sidecar, None, step)
        self.pages = torch.zeros(blocks, H, 1, fmt.record_bytes, dtype=torch.uint8)
        self.noise, self.tokens = torch.Generator().manual_seed(0), 0

    def new(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Query, key and value of that many new tokens for each request."""
        return tuple(torch.randn(2 * tokens, heads, D, generator=self.noise) for heads in (2 * H, H, H))

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        count = len(query) // 2
        self.tokens += count
        start, length = (torch.tensor(x, dtype=torch.int32) for x in ((0, count, 2 * count), (self.tokens,) * 2))
        batch = StepBatch(start, start, length, self.ids[:, :4].contiguous(), self.ids[:, 4:].contiguous(), None, count)
        out = torch.zeros_like(query)
        self.layer.run(batch, query, key, value, self.pages, out)
        if isinstance(self.layer.step, GPUStep):
            FaultWatch(self.layer.step).poll()
        return out

    @property
    def header(self) -> torch.Tensor:
        """The second request's header: magic, first own position, next position."""
        return self.slots.headers(self.layer.sidecar.blocks)[self.ids[1, 4]]


@pytest.mark.parametrize("path", WISHES)
def test_damage_is_said(path: str, said: list[str]) -> None:
    requests = Requests(path)
    who = "packed layers" if path.startswith("GPU") else "layers.7.attn"
    query, key, value = requests.new(N - 1)
    requests.run(query, key, value)
    assert not said
    # a decode step that completes a unit
    query, key, value = requests.new(1)
    key[0, 1, 3], key[1, 0, 5], value[1, 1, 7] = torch.nan, 1e6, -torch.inf
    requests.run(query, key, value)
    assert len(said) == 1
    assert said[0].startswith(f"kvq: {who}: 3 keys or values were inf, nan or beyond +-32768 so far")
    # a chunk of a prompt
    query, key, value = requests.new(N)
    key[:, :, :8] = torch.nan
    requests.run(query, key, value)
    assert f"kvq: {who}: {3 + 2 * N * H * 8} keys or values" in said[-1]


def test_a_warning_for_ten_times_as_many(said: list[str]) -> None:
    damage = Damage("layer")
    for count in (0, 1, 1, 7, 0, 1, torch.tensor(40), 49, 1):
        damage.count(count)
    assert damage.total == 100
    assert [int(line.split(": ")[2].split()[0]) for line in said] == [1, 10, 100]


def stale(header: torch.Tensor) -> dict[str, Callable[[], None]]:
    def put(at: int, value: int) -> Callable[[], None]:
        return lambda: header.__setitem__(at, value)

    return {"magic": put(0, 7), "next": put(2, int(header[2]) + 1), "before": put(2, int(header[2]) - 1)}


@pytest.mark.parametrize("what", ["magic", "next", "before"])
@pytest.mark.parametrize("path", WISHES)
def test_a_sidecar_of_other_tokens_ends_the_engine(path: str, what: str) -> None:
    requests = Requests(path)
    requests.run(*requests.new(40))
    stale(requests.header)[what]()
    words = "stale sidecar: 1 steps" if path.startswith("GPU") else "layers.7.attn: stale sidecar: magic"
    with pytest.raises(RuntimeError, match=words):
        requests.run(*requests.new(1))


def test_vllm_asks_before_each_step(said: list[str]) -> None:
    """The metadata builder looks at the counters of the GPU's steps; layers share a step."""
    requests = Requests("GPU/Triton")
    step = requests.layer.step
    assert isinstance(step, GPUStep)
    impl = SimpleNamespace(packed=SimpleNamespace(step=step, damage=requests.layer.damage))
    layers = {name: SimpleNamespace(impl=impl) for name in ("a", "b")}
    builder: Any = object.__new__(KVQMetadataBuilder)
    builder.watches, builder.layer_names = None, list(layers)
    builder.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    start = torch.tensor([0, 1])
    common = SimpleNamespace(
        query_start_loc_cpu=start,
        query_start_loc=start + 0,
        seq_lens=torch.tensor([5]),
        block_table_tensor=torch.zeros(1, 1),
        max_query_len=1,
    )
    made = builder.build(0, common)
    assert (made.query_start is start, made.longest, len(builder.watches)) == (True, 1, 1)
    step.faults[1] = 9
    builder.build(0, common)
    builder.build(0, common)
    assert len(said) == 1
    assert ": 9 keys or values" in said[0]
    step.faults[0] = 2
    with pytest.raises(RuntimeError, match="stale sidecar: 2 steps of requests"):
        builder.build(0, common)

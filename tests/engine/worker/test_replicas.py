"""Four ranks of tensor parallelism and two KV heads, in one process, with a group that gives each the others' data.

The same with processes: tests/processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.integration.worker import replicas
from vllm_kvq.integration.worker.replicas import all_queries_of, queries_of_all_copies
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, StepBatch
from vllm_kvq.kernels.torch.step import PlannedStep

pytestmark = pytest.mark.engine
RANKS, HEADS, EACH, D = 4, 2, 3, 64
"""Each rank has EACH query heads; HEADS are the KV heads of the model."""
COPIES = RANKS // HEADS


@dataclass
class Group:
    """vLLM's tensor parallel group as rank `rank_in_group` sees it."""

    whole: torch.Tensor
    """The queries of one process, (tokens, query heads, d), which vLLM cuts into ranks one after the other."""
    rank_in_group: int
    world_size: int = RANKS

    @property
    def own(self) -> torch.Tensor:
        return self.whole.chunk(self.world_size, 1)[self.rank_in_group]

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 1
        assert x.is_contiguous()
        assert torch.equal(x, self.own)
        return self.whole


@pytest.fixture
def queries() -> torch.Tensor:
    return torch.randn(70, RANKS * EACH, D, generator=torch.Generator().manual_seed(0))


def as_rank(monkeypatch: pytest.MonkeyPatch, group: Group) -> torch.Tensor:
    """The queries of this rank; its group is vLLM's from now on."""
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    return group.own


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_queries_that_share_a_head(rank: int, queries: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    own = as_rank(monkeypatch, Group(queries, rank))
    got = queries_of_all_copies(own, COPIES)
    # one process's tensor: (tokens, KV heads, query heads of each, d)
    assert torch.equal(got, queries.unflatten(1, (HEADS, -1))[:, rank // COPIES])
    # not contiguous, as a slice of a fused projection is
    assert torch.equal(queries_of_all_copies(own.transpose(0, 1).contiguous().transpose(0, 1), COPIES), got)


@pytest.mark.parametrize(("ranks", "heads", "copies"), [(4, 2, 2), (8, 2, 4), (4, 1, 4), (2, 2, 1), (1, 8, 1)])
def test_how_many_copies(ranks: int, heads: int, copies: int) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(model_arch_config=[SimpleNamespace(total_num_kv_heads=heads)]),
    )
    found = all_queries_of(config, 0)
    if copies == 1:
        assert found is None
        return
    assert found is not None
    assert found.keywords == {"copies": copies}  # type: ignore[attr-defined]
    # layers share a step if their arguments are equal
    assert all_queries_of(config, 0) is found


def packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gather: Callable[..., Any] | None
) -> torch.Tensor:
    """The pages that a prompt fills on a rank."""
    heads = key.shape[1]
    fmt = get_format("squat2").bind(Geometry(D, 32, torch.float32), {"W": 0, "S": 0})
    slots = SlotGeometry.of(fmt, heads, 0)
    step = PlannedStep(fmt, slots, 0, D**-0.5, torch.device("cpu"), all_queries=gather)
    blocks = 4 + slots.sidecar_blocks
    pages = torch.zeros(blocks, heads, fmt.record_bytes, dtype=torch.uint8)
    caches = Caches(pages, torch.zeros(blocks, slots.page_bytes // 4), None)
    start, side = torch.tensor([0, len(query)]), torch.arange(4, blocks)[None]
    batch = StepBatch(start, start, start[1:], torch.tensor([[1, 2, 3]]), side, None, len(query))
    step.run(batch, caches, query, key, value, torch.empty_like(query))
    return pages[1:3]


def test_pages_are_those_of_one_process(queries: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(1)
    key, value = (torch.randn(len(queries), HEADS, D, generator=rng) for _ in range(2))
    whole, gather = packed(queries, key, value, None), replicas._gatherer(COPIES)
    made = []
    for rank in range(RANKS):
        own, head = as_rank(monkeypatch, Group(queries, rank)), rank // COPIES
        made.append(packed(own, key[:, head : head + 1], value[:, head : head + 1], gather))
        # sums of one head are computed in a different order from those of two
        assert (made[-1][:, 0] != whole[:, head]).float().mean() < 2e-3
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])
    # the control: with only a rank's own queries, pages differ
    alone = packed(queries[:, :EACH], key[:, :1], value[:, :1], None)
    assert (alone != made[0]).float().mean() > 0.01

"""How the contents of the cache are counted: shared prefixes, sinks, time, cost; and where the numbers go."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_kvq.integration import metrics
from vllm_kvq.integration.core import held
from vllm_kvq.integration.core.manager import PackedManager, SidecarManager, SinkManager
from vllm_kvq.integration.core.spec import SidecarSpec

pytestmark = pytest.mark.engine
N, PAGE, ELEMENTS, COPIES = 32, 4096, 256, 6


def spec(**changes: int) -> SidecarSpec:
    fields: dict[str, Any] = {
        "block_size": N,
        "num_kv_heads": 1,
        "head_size": PAGE // 4,
        "head_size_v": 0,
        "dtype": torch.float32,
        "tokens_per_state": N,
        "state_content_bytes": PAGE,
        "blocks_per_request": 2,
        "window": 32,
        "unit": 32,
        "sinks": 0,
        "elements": ELEMENTS,
        "copies": COPIES,
        "mean_page_bytes": float(PAGE),
    }
    return SidecarSpec(**{**fields, **changes})


def manager(cls: type, blocks: dict[str, list[object]], kv_cache_spec: Any) -> Any:
    made = cls.__new__(cls)
    made.req_to_blocks, made.kv_cache_spec, made.block_size = blocks, kv_cache_spec, N
    return made


class Scheduler:
    """The parts of vLLM's scheduler that are looked at."""

    def __init__(self, requests: dict[str, int], shared: int = 0, sinks: int = 0, **changes: Any) -> None:
        """Requests' tokens, whose first `shared` pages are the same."""
        first = [object() for _ in range(shared)]
        pages = {r: first + [object() for _ in range(-(-n // N) - shared)] for r, n in requests.items()}
        sink_pages = [object()] if sinks else []
        sidecar = spec(sinks=sinks, **changes)
        packed = SimpleNamespace(page_size_bytes=PAGE, tokens_per_state=N)
        padded = SimpleNamespace(page_size_bytes=PAGE, tokens_per_state=1)
        managers = [
            # a draft's layers, in 16 bits
            manager(SimpleNamespace, {}, padded),
            manager(PackedManager, pages, packed),
            manager(SidecarManager, {r: [object(), object()] for r in requests}, sidecar),
            *([manager(SinkManager, dict.fromkeys(requests, sink_pages), sidecar)] if sinks else []),
        ]
        self.kv_cache_manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
        self.running = [SimpleNamespace(num_computed_tokens=n) for n in requests.values()]
        self.vllm_config: Any = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="tiny"),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )

    def count(self) -> held.Held:
        return held.Census(self).count([r.num_computed_tokens for r in self.running])


@pytest.mark.parametrize(("tokens", "packed"), [(0, 0), (31, 0), (63, 0), (64, 32), (95, 32), (96, 64), (1000, 960)])
def test_a_request(tokens: int, packed: int) -> None:
    found = Scheduler({"a": tokens}).count()
    assert (found.packed, found.packed + found.full_precision) == (packed, tokens)
    assert found.sidecar_bytes == 2 * PAGE * COPIES
    blocks = -(-tokens // N) + 2
    assert found.bits == (pytest.approx(8 * blocks * PAGE / (tokens * ELEMENTS)) if tokens else 0)


def test_sinks_are_in_full_precision_and_shared() -> None:
    found = Scheduler({"a": 96, "b": 40}, sinks=16).count()
    assert found == held.Held(48, 48 + 40, 5 * PAGE * COPIES, pytest.approx(8 * (3 + 2 + 5) * PAGE / (136 * ELEMENTS)))


def test_pages_of_several_sizes_count_by_their_mean() -> None:
    same, other = Scheduler({"a": 128}).count(), Scheduler({"a": 128}, mean_page_bytes=1.25 * PAGE).count()
    assert (other.packed, other.full_precision) == (same.packed, same.full_precision)
    assert (other.sidecar_bytes, other.bits) == (1.25 * same.sidecar_bytes, pytest.approx(1.25 * same.bits))


def test_a_shared_prefix_costs_once() -> None:
    alone, both = Scheduler({"a": 128}), Scheduler({"a": 128, "b": 140}, shared=4)
    assert both.count().packed == 2 * alone.count().packed
    assert both.count().bits == pytest.approx(8 * (5 + 4) * PAGE / (140 * ELEMENTS))


def scrape(folder: Path) -> dict[str, float]:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    return {sample.name: sample.value for family in registry.collect() for sample in family.samples}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(metrics.OUR_FOLDER, raising=False)
    monkeypatch.setenv(metrics.VLLMS_FOLDER, str(tmp_path))
    metrics._file.cache_clear()
    yield tmp_path
    metrics._file.cache_clear()


def test_it_is_taken_once_a_second_and_at_both_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a census takes no time: a slow machine would take it less often."""
    now = [100.0]
    monkeypatch.setattr(held.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(held.time, "thread_time", lambda: 0.0)
    scheduler = Scheduler({"a": 64})
    (request,) = every = list(scheduler.running)
    for at, running, tokens, want in [
        (100.0, True, 64, 64),
        (100.9, True, 70, 64),
        (101.0, True, 75, 75),
        (101.1, False, 0, 0),
        (101.2, True, 80, 80),
    ]:
        now[0], request.num_computed_tokens = at, tokens
        scheduler.running = every if running else []
        held.take_census(scheduler)
        found = scrape(folder)
        assert found["vllm:kvq_packed_tokens"] + found["vllm:kvq_full_precision_tokens"] == want


def test_a_scrape_sees_one_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that comes while the numbers of the next are written."""
    now, seen = [100.0], []
    monkeypatch.setattr(held.time, "monotonic", lambda: now[0])
    write = metrics.MmapedDict.write_value

    def watched(self: metrics.MmapedDict, key: str, value: float, timestamp: float) -> None:
        write(self, key, value, timestamp)
        seen.append(scrape(folder))

    scheduler = Scheduler({"a": 640})
    counts = []
    for tokens in (0, 500, 640):
        scheduler.running[0].num_computed_tokens, now[0] = tokens, now[0] + 100
        held.take_census(scheduler)
        counts.append(scrape(folder))
        monkeypatch.setattr(metrics.MmapedDict, "write_value", watched)
    assert len(seen) == 2 * 4
    assert seen == [counts[0]] * 4 + [counts[1]] * 4
    assert counts[0] != counts[1] != counts[2]


def test_counts_are_seen_after_the_clock_was_set_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has written zeros at its start, in a file of its own; of a gauge's values, the newest counts."""
    metrics.Series("tiny", "0").set(metrics.PACKED, 0)
    assert scrape(folder)["vllm:kvq_packed_tokens"] == 0
    now = time.time()
    monkeypatch.setattr(metrics.time, "time", lambda: now - 10**6)
    held.take_census(Scheduler({"a": 640}))
    assert scrape(folder)["vllm:kvq_packed_tokens"] > 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_it_is_taken_less_often_where_it_takes_long(
    interrupted: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost is measured in work, not in how long the machine kept the process waiting."""
    now, worked = [100.0], [0.0]
    monkeypatch.setattr(held.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(held.time, "thread_time", lambda: worked[0])

    def slowly(self: held.Census, lengths: list[int]) -> held.Held:
        now[0] += 5 if interrupted else 0.02
        worked[0] += 0.02
        return held.Held(0, sum(lengths), 0, 0)

    monkeypatch.setattr(held.Census, "count", slowly)
    scheduler, times = Scheduler({"a": 64}), []
    for tokens in range(200):
        scheduler.running[0].num_computed_tokens = tokens
        before = now[0]
        held.take_census(scheduler)
        if now[0] != before:
            times.append(before)
        now[0] += 0.1
    assert 0.02 / (times[1] - times[0]) <= held.LARGEST_SHARE
    assert times[2] - times[0] < 2.2 * 0.02 / held.LARGEST_SHARE + 10


def test_a_scheduler_without_our_caches_is_left_alone(folder: Path) -> None:
    scheduler = Scheduler({"a": 64})
    del scheduler.kv_cache_manager.coordinator.single_type_managers[1:]
    held.take_census(scheduler)
    assert list(folder.iterdir()) == []


def test_processes_add_up_what_they_clamp(folder: Path) -> None:
    """Two processes, by fork: each writes a file of its own."""
    series = metrics.Series("tiny", "0")
    series.add(metrics.CLAMPED, 5)
    if (child := os.fork()) == 0:
        series.add(metrics.CLAMPED, 2)
        os._exit(0)
    os.waitpid(child, 0)
    series.add(metrics.CLAMPED, 10)
    assert scrape(folder)["vllm:kvq_clamped_total"] == 17
    assert len(list(folder.glob("counter_*.db"))) == 2


def test_without_a_reader_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a process of a server on another machine, or of a program that only makes a configuration."""
    monkeypatch.chdir(tmp_path)
    for place in (None, str(tmp_path / "not here")):
        monkeypatch.delenv(metrics.VLLMS_FOLDER, raising=False)
        monkeypatch.delenv(metrics.OUR_FOLDER, raising=False)
        if place:
            monkeypatch.setenv(metrics.OUR_FOLDER, place)
        metrics._file.cache_clear()
        metrics.Series("tiny", "0").add(metrics.CLAMPED, 5)
        assert list(tmp_path.iterdir()) == []
    metrics._file.cache_clear()


def test_a_full_disk_stops_no_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses room for the files; what was counted before stays, and later counts are exported again."""
    scheduler, now = Scheduler({"a": 640}), [100.0]
    monkeypatch.setattr(held.time, "monotonic", lambda: now[0])
    held.take_census(scheduler)
    before = scrape(folder)
    for limit, after in [(metrics.FILE_BYTES // 2, 640), (resource.RLIM_INFINITY, 500)]:
        scheduler.running[0].num_computed_tokens, now[0] = 500, now[0] + 100
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            held.take_census(scheduler)
            metrics.Series("tiny", "0").add(metrics.CLAMPED, 5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        found = scrape(folder)
        assert found["vllm:kvq_packed_tokens"] + found["vllm:kvq_full_precision_tokens"] == after
        assert (found == before) == (after == 640)


def test_a_step_costs_nothing_worth_naming(folder: Path) -> None:
    """Between two counts, with 256 requests."""
    scheduler = Scheduler({str(i): 4096 for i in range(256)})
    held.take_census(scheduler)
    started = time.thread_time()
    for _ in range(1000):
        held.take_census(scheduler)
    assert time.thread_time() - started < 1000 * 20e-6

"""What a GPU's kernels have counted becomes an error or a warning on the host."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.integration.worker import report
from vllm_kvq.integration.worker.faults import FaultWatch


@dataclass
class Step:
    faults: torch.Tensor


class OnDevice(torch.Tensor):
    """A tensor on the host that passes for one on a GPU."""

    is_cuda = True


class Copied:
    """The event of a copy that is done when the test says so."""

    done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(report, "logger", SimpleNamespace(warning=lambda text, *values: said.append(values)))
    return said


def watch() -> tuple[torch.Tensor, FaultWatch]:
    faults = torch.zeros(2, dtype=torch.int32)
    return faults, FaultWatch(Step(faults))  # type: ignore[arg-type]


def test_stale_sidecars_raise_in_every_poll(warnings: list[tuple[Any, ...]]) -> None:
    faults, watching = watch()
    watching.poll()
    faults[0] = 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stale sidecar: 3 steps"):
            watching.poll()
    assert not warnings


def test_damage_is_counted_once_and_warned_of(warnings: list[tuple[Any, ...]]) -> None:
    faults, watching = watch()
    totals = []
    for faults[1] in (0, 4, 4, 7, 40, 41):
        watching.poll()
        totals.append(watching.damage.total)
    assert totals == [0, 4, 4, 7, 40, 41]
    assert warnings == [("packed layers", 4), ("packed layers", 40)]


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of a copy is judged when it has arrived, and never before."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    monkeypatch.setattr(Copied, "done", False)
    faults = torch.zeros(2, dtype=torch.int32)
    watching = FaultWatch(Step(faults.as_subclass(OnDevice)))  # type: ignore[arg-type]
    watching.poll()  # nothing is under way yet
    faults[0] = 1
    watching.poll()
    assert not watching.seen.any()  # the first copy has not arrived
    monkeypatch.setattr(Copied, "done", True)
    watching.poll()  # it judges what came before the fault, and asks again
    with pytest.raises(RuntimeError, match="stale sidecar: 1 steps"):
        watching.poll()

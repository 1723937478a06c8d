"""What a GPU's kernels have counted of stale sidecars and damaged inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_kvq.integration.worker.report import Damage
from vllm_kvq.kernels.gpu.step import GPUStep


@dataclass
class FaultWatch:
    """Looks at a step's counters without waiting for the device: a step or two late."""

    step: GPUStep
    damage: Damage = field(default_factory=lambda: Damage("packed layers"))
    seen: torch.Tensor = field(init=False)
    copied: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.seen = torch.zeros(2, dtype=torch.int32, pin_memory=self.step.faults.is_cuda)

    def poll(self) -> None:
        """Raises if a request's sidecar was stale; warns of damaged inputs."""
        faults = self.step.faults
        if faults.is_cuda:
            if self.copied is not None and not self.copied.query():
                return
            self._judge()
            self.seen.copy_(faults, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()
        else:
            self.seen.copy_(faults)
            self._judge()

    def _judge(self) -> None:
        stale, replaced = self.seen.tolist()
        if stale:
            raise RuntimeError(f"stale sidecar: {stale} steps of requests met the header of other tokens")
        self.damage.count(replaced - self.damage.total)

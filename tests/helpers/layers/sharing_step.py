"""A step whose answers are those of a layer that shares the caches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_kvq.kernels.step import Caches, Step, StepBatch


@dataclass
class SharedStep:
    """`step` serves a layer with a cache and two that share it; the last one gives the answer. Between the layers vLLM
    reuses the memory of keys and values."""

    step: Step

    def run(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int:
        caches = replace(caches, readers=2)
        other = torch.empty_like(output)
        new = key.clone(), value.clone()
        replaced = self.step.run(batch, caches, query, *new, other)
        for x in new:
            x.fill_(torch.nan)
        self.step.share(batch, caches, -query, other)
        self.step.share(batch, caches, query, output)
        assert caches.shared is None, "what is kept for sharing layers is kept too long"
        return replaced

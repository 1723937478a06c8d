"""The packed layers' step on a GPU (kernels/device.py): everything it decides, it decides on the device.

VLLM_KVQ_DEVICE_PATH=1 runs it on the CPU as well, under Triton's interpreter: for tests of the real engine.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.integration.prefill import prefill_for
from vllm_kvq.integration.replicas import queries_of_all_copies
from vllm_kvq.integration.setup import kvq_options
from vllm_kvq.integration.sidecar import Sidecar, Sinks, SlotGeometry
from vllm_kvq.kernels.gpu import step as kernels
from vllm_kvq.kernels.gpu.step import Batch, Caches, DeviceStep

logger = init_logger("vllm.kvq")


def wanted(device_type: str) -> bool:
    """Whether layers on such a device run this path if their format can."""
    return device_type == "cuda" or os.environ.get("VLLM_KVQ_DEVICE_PATH") == "1"


def serves(vllm_config: Any, head_size: int, block_size: int, device_type: str) -> bool:
    """Whether the configured format runs on the device alone, so that CUDA graphs may hold it."""
    if not wanted(device_type):
        return False
    name, dtype = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    return kernels.supports(get_format(name).bind(Geometry(head_size, block_size, dtype), kvq_options(vllm_config)))


@functools.cache
def _step(fmt: PageFormat, slots: SlotGeometry, num_spec: int, device: torch.device) -> DeviceStep:
    return DeviceStep(fmt, slots, num_spec, device)


@dataclass
class DeviceLayer:
    """One layer: its companions, and the step that it shares with layers of the same format."""

    step: DeviceStep
    sidecar: Sidecar
    sinks: Sinks | None
    scale: float
    copies: int
    """How many ranks hold the same KV heads."""

    @classmethod
    def create(
        cls,
        fmt: PageFormat,
        sidecar: Sidecar,
        sinks: Sinks | None,
        scale: float,
        num_spec: int,
        device: torch.device,
        copies: int = 1,
    ) -> DeviceLayer | None:
        """None: this device or format is served by integration/layer.py."""
        if not wanted(device.type):
            return None
        if not kernels.supports(fmt):
            logger.warning_once(
                "kvq: %s has no kernels for this GPU's whole step: every step is planned on the host, without CUDA "
                "graphs, and slow; with their default options squat2, qjl3, innerq2 and polar4 have them",
                fmt.name,
            )
            return None
        return cls(_step(fmt, sidecar.slots_geometry, num_spec, device), sidecar, sinks, scale, copies)

    def forward(
        self,
        batch: Batch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        geometry = self.step.fmt.geometry
        caches = Caches(
            kv_cache.view(torch.uint8).flatten(2),
            self.sidecar.kv_cache.flatten(1),
            None if self.sinks is None else self.sinks.kv_cache.flatten(1),
        )
        prefill = prefill_for(query.device, geometry.dtype, geometry.head_size)
        everyone = queries_of_all_copies(query, self.copies) if self.step.fits_queries else None
        self.step.run(batch, caches, query, key, value, output, self.scale, prefill, everyone)


@dataclass
class FaultWatch:
    """What kernels counted, looked at without waiting for the device: a step or two late."""

    step: DeviceStep
    seen: torch.Tensor = field(init=False)
    copied: Any = None
    said: int = 0

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
        stale, damage = self.seen.tolist()
        if stale:
            raise RuntimeError(f"stale sidecar: {stale} steps of requests met the header of other tokens")
        if damage and damage >= 10 * self.said:
            self.said = damage
            logger.warning(
                "kvq: %d keys or values were inf, nan or beyond +-32768 so far and were replaced before packing; "
                "the model's activations are broken or need --kv-cache-dtype auto",
                damage,
            )

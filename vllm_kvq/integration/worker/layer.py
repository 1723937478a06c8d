"""One packed attention layer at work: its format, its companions, and the step that serves it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.constants import Constants
from vllm_kvq.integration.metrics import CLAMPED, Series
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.worker.calibration.fitting import calibrate
from vllm_kvq.integration.worker.companions import SIDECAR_SUFFIX, SINK_SUFFIX, Sidecar, Sinks, SlotGeometry
from vllm_kvq.integration.worker.layout import put_first, smallest_first
from vllm_kvq.integration.worker.prompts import Asked, prompts_for
from vllm_kvq.integration.worker.replicas import all_queries_of
from vllm_kvq.integration.worker.report import Damage, report_start
from vllm_kvq.kernels.cpu.step import CPUStep
from vllm_kvq.kernels.paths import Path, step_for
from vllm_kvq.kernels.step import Caches, Prompts, Step, StepBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvq")


class PackedLayer:
    def __init__(
        self,
        fmt: PageFormat,
        name: str,
        scale: float,
        sidecar: Sidecar,
        sinks: Sinks | None,
        step: Step,
        export: Callable[[int], None] = lambda more: None,
        learned: torch.Tensor | None = None,
        step_for: Callable[[PageFormat], Step] | None = None,
    ) -> None:
        """`learned`: attention sinks that are a weight of the layer. `step_for`: the step of the same format with
        constants."""
        self.fmt, self.name, self.scale, self.learned = fmt, name, scale, learned
        self.sidecar, self.sinks = sidecar, sinks
        self.sidecar_name = name + SIDECAR_SUFFIX
        self.sink_name = name + SINK_SUFFIX if sinks is not None else None
        self.step, self.step_for = step, step_for
        self.calibration: str | None = None
        """The digest of all layers' constants."""
        self.damage = Damage(name, export)
        self.readers: list[Callable[[PageFormat], None]] = []
        """What layers that share the caches do when the format gets constants."""
        self.shared: Caches | None = None
        """The caches in this step, for these layers."""

    @classmethod
    def create(
        cls,
        fmt: PageFormat,
        name: str,
        heads: int,
        scale: float,
        vllm_config: VllmConfig,
        served: Served,
        layers: dict[str, Any],
        learned: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> PackedLayer:
        """The layer and its companions, which become layers of the model's forward context. `cap`: the soft cap of its
        scores; 0: none."""
        slots = SlotGeometry.of(fmt, heads, vllm_config.num_speculative_tokens)
        # an existing companion is kept: after a reload of weights its cache is still bound
        first = not any(layer.endswith(SIDECAR_SUFFIX) for layer in layers)
        report = functools.partial(report_start, served, vllm_config) if first else None
        if first and served.mixed:
            put_first(name, layers)
        loaded = calibrate if first and served.calibration is not None else None
        sidecar = layers.setdefault(name + SIDECAR_SUFFIX, Sidecar(fmt, slots, served, report, loaded))
        sinks = layers.setdefault(name + SINK_SUFFIX, Sinks(fmt, slots, served)) if fmt.S else None
        if served.sizes > 1:
            for suffix in (SIDECAR_SUFFIX, SINK_SUFFIX):
                smallest_first([n for n in layers if n.endswith(suffix)], layers)
        step_for = functools.partial(
            step_of,
            slots=slots,
            scale=scale,
            vllm_config=vllm_config,
            path=served.path,
            merged=learned is not None,
            cap=cap,
        )
        step = step_for(fmt)
        export = functools.partial(Series.of(vllm_config).add, CLAMPED)
        if learned is not None and isinstance(step, CPUStep):
            logger.warning_once(
                "kvq: layers with learned attention sinks take several calls per decode step on the CPU"
            )
        return cls(fmt, name, scale, sidecar, sinks, step, export, learned, step_for)

    def calibrate(self, constants: Constants, digest: str) -> None:
        """From now on pages are packed and read with these constants."""
        if self.step_for is None:
            raise RuntimeError(f"{self.name} has no step to repeat")
        self.fmt, self.calibration = self.fmt.with_constants(constants), digest
        self.step = self.step_for(self.fmt)
        for bind in self.readers:
            bind(self.fmt)

    def run(
        self,
        batch: StepBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """`kv_cache` is vLLM's (blocks, H, 1, record bytes)."""
        sinks = None if self.sinks is None else self.sinks.blocks
        caches = Caches(
            kv_cache.view(torch.uint8).flatten(2), self.sidecar.blocks, sinks, self.learned, len(self.readers)
        )
        self.shared = caches if self.readers else None
        try:
            self.damage.count(self.step.run(batch, caches, query, key, value, output))
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # PyTorch's own, such as running out of memory
                raise
            raise RuntimeError(f"{self.name}: {error}") from error


def step_of(
    fmt: PageFormat,
    slots: SlotGeometry,
    scale: float,
    vllm_config: VllmConfig,
    path: Path,
    merged: bool = False,
    cap: float = 0.0,
) -> Step:
    """`merged`: attention among a prompt's new tokens must return its log-sum-exp."""
    num_spec, device = vllm_config.num_speculative_tokens, vllm_config.device_config.device
    geometry = fmt.geometry

    def prompts(wanted: bool) -> Prompts:
        return prompts_for(Asked(device, geometry.dtype, geometry.head_size, wanted or merged, cap > 0))

    queries = all_queries_of(vllm_config, geometry.layer)
    return step_for(path, fmt, slots, num_spec, scale, device, prompts, queries, cap)

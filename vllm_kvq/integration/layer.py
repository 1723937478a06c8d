"""One packed attention layer at work: update the caches of all requests, then attend.

Updating comes first for the whole batch, because a request may hit a page that another one completes in this very
step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.integration import device as device_path
from vllm_kvq.integration.device import DeviceLayer
from vllm_kvq.integration.prompt import causal
from vllm_kvq.integration.replicas import copies_of_a_head, queries_of_all_copies
from vllm_kvq.integration.report import Damage, report_start
from vllm_kvq.integration.served import Served
from vllm_kvq.integration.sidecar import SIDECAR_SUFFIX, SINK_SUFFIX, Sidecar, Sinks, SlotGeometry
from vllm_kvq.kernels import kernels_for
from vllm_kvq.kernels.cpu.step import DecodeBatch
from vllm_kvq.kernels.torch.plan import Batch, Fit, Planner, StepPlan


def _path(fmt: PageFormat, device: torch.device) -> str:
    """Which kernels serve."""
    if device_path.wanted(device.type) and device_path.kernels.supports(fmt):
        return "GPU"
    return {"cpu": "C++", "torch": "PyTorch"}[kernels_for(device).name]


class PackedLayer:
    def __init__(
        self,
        fmt: PageFormat,
        name: str,
        heads: int,
        scale: float,
        num_spec: int,
        sidecar: Sidecar,
        sinks: Sinks | None,
        device: torch.device,
        copies: int = 1,
    ) -> None:
        self.fmt, self.name, self.heads, self.scale = fmt, name, heads, scale
        self.sidecar, self.sinks = sidecar, sinks
        self.copies = copies
        self.sidecar_name = name + SIDECAR_SUFFIX
        self.sink_name = name + SINK_SUFFIX if sinks is not None else None
        self.planner = Planner(fmt, sidecar.slots_geometry, num_spec, device)
        self.device = DeviceLayer.create(fmt, sidecar, sinks, scale, num_spec, device, copies)
        """Not None: serves this layer instead of everything below."""
        self.damage = Damage(name)
        self.kernels = kernels_for(device)
        self.decode_step = self.kernels.decode(fmt, sidecar.slots_geometry, num_spec, scale)

    @classmethod
    def create(
        cls,
        fmt: PageFormat,
        name: str,
        heads: int,
        scale: float,
        vllm_config: Any,
        layers: dict[str, Any],
    ) -> PackedLayer:
        """The layer and its companions, which become layers of the model's forward context."""
        num_spec = vllm_config.num_speculative_tokens
        slots = SlotGeometry.of(fmt, heads, num_spec)
        # an existing companion is kept: after a reload of weights its cache is still bound
        first = not any(layer.endswith(SIDECAR_SUFFIX) for layer in layers)
        device = vllm_config.device_config.device
        served = Served.of(vllm_config)
        report = functools.partial(report_start, served, vllm_config, _path(fmt, device), None) if first else None
        sidecar = layers.setdefault(name + SIDECAR_SUFFIX, Sidecar(fmt, slots, report))
        sinks = layers.setdefault(name + SINK_SUFFIX, Sinks(fmt, slots)) if fmt.S else None
        copies = copies_of_a_head(vllm_config)
        return cls(fmt, name, heads, scale, num_spec, sidecar, sinks, device, copies)

    # -- step ------------------------------------------------------------------------------------------------------
    def plan(self, batch: Batch, plans: list[StepPlan]) -> StepPlan:
        """The plan of this step: another layer's, if this layer's headers agree with it."""
        for known in plans:
            if torch.equal(known.found, self.sidecar.headers[known.header_block]):
                return known
        headers = self.sidecar.headers[self.planner._long(batch.sidecar[:, 0])]
        plans.append(self.planner.plan(batch, headers, len(self.sidecar.slots)))
        return plans[-1]

    def decode(
        self,
        batch: DecodeBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        """Serves the step without a plan; False, and nothing is done, where it takes one."""
        if self.decode_step is None:
            return False
        sinks = self.sidecar.no_blocks if self.sinks is None else self.sinks.blocks
        caches = self.pages(kv_cache), self.sidecar.blocks, sinks
        try:
            replaced = self.decode_step.run(batch, *caches, query, key, value, output)
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {error}") from error
        if replaced is not None:
            self.damage.count(replaced)
        return replaced is not None

    def pages(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """(blocks, H, record bytes) of vLLM's (blocks, H, 1, C)."""
        return kv_cache.view(torch.uint8).flatten(2)

    def update(
        self,
        plan: StepPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Returns what chunks overwrote in their rings, (tokens, 2, H, head_size): they still have to attend it."""
        sidecar = self.sidecar
        ring = sidecar.slots[plan.ring_read]
        for fit in plan.fits:
            self._fit(fit, query, key)
        if plan.units is not None:
            state = None if plan.unit_state is None else sidecar.read_state(*plan.unit_state)
            pages = self.pages(kv_cache)
            self.damage.count(self.kernels.pack(self.fmt, pages, plan.units, sidecar.tokens, (key, value), state))
        self.kernels.store(sidecar.tokens, plan.ring_write, (key, value), plan.ring_rows)
        if self.sinks is not None and len(plan.sink_rows):
            self.kernels.store(self.sinks.tokens, plan.sink_write, (key, value), plan.sink_rows)
        sidecar.headers[plan.header_block] = plan.header
        return ring

    def _fit(self, fit: Fit, query: torch.Tensor, key: torch.Tensor) -> None:
        """The request's state after this chunk of its prompt."""
        block, slot = fit.state
        state = None if fit.fresh else self.sidecar.read_state(block[None], slot[None])[0]
        state = self.kernels.fit(self.fmt, queries_of_all_copies(query[fit.rows], self.copies), key[fit.rows], state)
        self.sidecar.write_state(block, slot, state)

    def attend(
        self,
        plan: StepPlan,
        ring: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        pages = self.pages(kv_cache)
        for group in plan.groups:
            q = group.pick(query)
            if group.held is None or group.seen is None:
                output[group.rows] = causal(q, group.pick(key), group.pick(value), self.scale)
                continue
            pool = (ring[:, None, 0], ring[:, None, 1]) if group.chunk else self.sidecar.tokens
            sinks = self.sidecar.no_tokens if self.sinks is None else self.sinks.tokens
            raw = pool, sinks, group.held, group.seen, self.scale
            lists = group.page_ids, group.owner, group.low, group.high
            if not group.chunk:
                packed = self.kernels.attend_step(self.fmt, output, group.rows, q, pages, *lists, *raw)
            else:
                packed = self.kernels.all_packed(self.fmt, pages, group.page_ids, group.low, group.high)
            if not packed:
                raise RuntimeError(f"{self.name}: a page that was never packed would have been read")
            if group.chunk:
                length = q.shape[1]
                earlier = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
                parts = [self.kernels.attend_raw(q, group.pick(key), group.pick(value), earlier, self.scale)]
                if len(group.page_ids):
                    parts.append(self.kernels.attend_packed(self.fmt, q, pages, *lists, self.scale))
                self.kernels.attend_into(output, group.rows, q, *raw, parts)

"""One packed attention layer at work: update the caches of all requests, then attend.

Updating comes first for the whole batch, because a request may hit a page that another one completes in this very
step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.planes import SLAB
from vllm_kvq.integration.plan import Batch, Fit, Group, Planner, StepPlan, Units
from vllm_kvq.integration.report import Damage, report_start
from vllm_kvq.integration.sidecar import SIDECAR_SUFFIX, SINK_SUFFIX, Sidecar, Sinks, SlotGeometry
from vllm_kvq.kernels import Partial, kernels_for, merge

PACK_BYTES = 64 << 20
"""Float32 that packing may hold at once."""


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
    ) -> None:
        self.fmt, self.name, self.heads, self.scale = fmt, name, heads, scale
        self.sidecar, self.sinks = sidecar, sinks
        self.sidecar_name = name + SIDECAR_SUFFIX
        self.sink_name = name + SINK_SUFFIX if sinks is not None else None
        self.planner = Planner(fmt, sidecar.slots_geometry, num_spec, device)
        self.damage = Damage(name)
        self.kernels = kernels_for(device)

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
        report = functools.partial(report_start, fmt, slots, vllm_config=vllm_config) if first else None
        sidecar = layers.setdefault(name + SIDECAR_SUFFIX, Sidecar(fmt, slots, report))
        sinks = layers.setdefault(name + SINK_SUFFIX, Sinks(fmt, slots)) if fmt.S else None
        return cls(fmt, name, heads, scale, num_spec, sidecar, sinks, vllm_config.device_config.device)

    # -- step ------------------------------------------------------------------------------------------------------
    def plan(self, batch: Batch, plans: list[StepPlan]) -> StepPlan:
        """The plan of this step: another layer's, if this layer's headers agree with it."""
        headers = self.sidecar.headers()[self.planner._long(batch.sidecar[:, 0])]
        for known in plans:
            if torch.equal(known.found, headers):
                return known
        plans.append(self.planner.plan(batch, headers))
        return plans[-1]

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
        """Returns the history's full-precision tokens, (tokens, 2, H, head_size): new ones now lie in their slots."""
        slots = self.sidecar.slots
        ring = slots[plan.ring_read]  # (tokens, 2, H, head_size), before the new tokens overwrite it
        for fit in plan.fits:
            self._fit(fit, query, key)
        if plan.units is not None:
            source = torch.cat([ring[:, 0], key]), torch.cat([ring[:, 1], value])
            size = 4 * self.fmt.unit * self.heads * self.fmt.geometry.d * 8
            for units in plan.units.split(max(1, PACK_BYTES // size)):
                self._pack(units, *source, self.pages(kv_cache))
        slots[plan.ring_write] = torch.stack([key[plan.ring_rows], value[plan.ring_rows]], dim=1)
        if self.sinks is not None and len(plan.sink_rows):
            self.sinks.slots[plan.sink_write] = torch.stack([key[plan.sink_rows], value[plan.sink_rows]], dim=1)
        self.sidecar.headers()[plan.header_block] = plan.header
        return ring

    def _fit(self, fit: Fit, query: torch.Tensor, key: torch.Tensor) -> None:
        """The request's state after this chunk of its prompt."""
        q, k = self.fmt.widen(query[fit.rows])[0], self.fmt.widen(key[fit.rows])[0]
        grouped = q.unflatten(1, (self.heads, -1)).transpose(0, 1).flatten(1, 2)
        block, slot = fit.state
        state = None if fit.fresh else self.sidecar.read_state(block[None], slot[None])
        self.sidecar.write_state(block, slot, self.fmt.keys.fit(grouped, k.transpose(0, 1), state))

    def _pack(self, units: Units, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor) -> None:
        fmt = self.fmt
        (k, lost_k), (v, lost_v) = fmt.widen(key[units.rows]), fmt.widen(value[units.rows])
        self.damage.count(lost_k + lost_v)
        state = None
        if units.state is not None:
            state = self.sidecar.read_state(*units.state)
            if fmt.keys.page_fields and units.follows.any():
                state = self._page_state(units, pages, state)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        fmt.write(pages, units.page, units.unit, fmt.encode(k, v, state))

    def _page_state(self, units: Units, pages: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """A page that was begun earlier keeps the parameters it was begun with."""
        begun = self.fmt.read_page_fields(pages[units.page].flatten(0, 1))
        kept = self.fmt.keys.page_state(begun)
        follows = units.follows.repeat_interleave(self.heads)[:, None, None]
        return state if kept is None else torch.where(follows, kept, state)

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
        early = self.sinks.slots[plan.sink_read] if self.sinks is not None else ring[:0]
        raw = torch.cat([early[:, 0], ring[:, 0], key]), torch.cat([early[:, 1], ring[:, 1], value])
        for group in plan.groups:
            q = query[group.rows]
            if group.raw is None or group.seen is None:
                out = self._causal(q, key[group.rows], value[group.rows])
            else:
                parts = [self.kernels.attend_raw(q, raw[0][group.raw], raw[1][group.raw], group.seen, self.scale)]
                if len(group.page_ids):
                    parts.append(self._attend_pages(group, q, pages))
                out = merge(parts)
            output[group.rows] = out.to(output.dtype)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Nothing precedes the new tokens."""
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *by_head, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _attend_pages(self, group: Group, q: torch.Tensor, pages: torch.Tensor) -> Partial:
        slab = SLAB * torch.arange(self.fmt.slabs, device=pages.device)
        needed = (slab < group.high[:, None]) & (slab + SLAB > group.low[:, None])
        if (needed & ~self.fmt.packed_slabs(pages, group.page_ids)).any():
            raise RuntimeError(f"{self.name}: a page that was never packed would have been read")
        return self.kernels.attend_packed(
            self.fmt, q, pages, group.page_ids, group.owner, group.low, group.high, self.scale
        )

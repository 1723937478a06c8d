"""A step that is planned on the host (`plan.py`) and executed by a table of kernels: PyTorch's serve every codec on
every device, C++ (kernels/cpu) those that it supports on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Causal, StepBatch
from vllm_kvq.kernels.torch import attend, pack
from vllm_kvq.kernels.torch.attend import Partial, with_learned
from vllm_kvq.kernels.torch.lists import TokenList
from vllm_kvq.kernels.torch.plan import Fit, Group, Planner, Requests, StepPlan


@dataclass(frozen=True)
class Kernels:
    """The functions that a planned step calls, documented in `kernels.torch.attend` and `kernels.torch.pack`."""

    attend_packed: Callable[..., Partial]
    attend_raw: Callable[..., Partial]
    attend_into: Callable[..., None]
    attend_step: Callable[..., bool]
    all_packed: Callable[..., bool]
    pack: Callable[..., torch.Tensor | int]
    store: Callable[..., None]
    fit: Callable[..., torch.Tensor]


TORCH = Kernels(
    attend.attend_packed,
    attend.attend_raw,
    attend.attend_into,
    attend.attend_step,
    attend.all_packed,
    pack.pack,
    pack.store,
    pack.fit,
)


@dataclass
class Planned:
    """What planned steps derive from a batch: in practice, one plan for all layers whose companions have the same
    layout, because their headers agree."""

    requests: Requests
    plans: list[tuple[SlotGeometry, StepPlan]] = field(default_factory=list)

    @classmethod
    def of(cls, batch: StepBatch) -> Planned:
        return cls(Requests.of(batch))


@dataclass(frozen=True, eq=False)
class Attended:
    """What a step attends, for layers that share the caches (`Caches.shared`)."""

    plan: StepPlan
    ring: torch.Tensor
    """The chunks' history, which the chunks have overwritten."""
    key: torch.Tensor
    value: torch.Tensor


class PlannedStep:
    """`kernels.step.Step` of one layer.

    `causal` attends prompts without history; None: PyTorch does. `all_queries` extends queries by those of other
    ranks that hold a copy of the same KV heads. `cap`: the soft cap of scores; 0: none.
    """

    def __init__(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        num_spec: int,
        scale: float,
        device: torch.device,
        kernels: Kernels = TORCH,
        causal: Causal | None = None,
        all_queries: Callable[[torch.Tensor], torch.Tensor] | None = None,
        cap: float = 0.0,
    ) -> None:
        self.fmt, self.slots, self.scale, self.cap, self.kernels = fmt, slots, scale, cap, kernels
        self.planner = Planner(fmt, slots, num_spec, device)
        self.causal, self.all_queries = causal or attend.causal, all_queries

    def run(
        self,
        batch: StepBatch,
        caches: Caches,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> int:
        planned = batch.derived(Planned)
        if not len(planned.requests.new):
            return 0
        plan = self.plan(planned, caches)
        ring, replaced = self.update(plan, caches, query, key, value)
        if caches.readers:
            caches.shared = Attended(plan, ring, key.clone(), value.clone())
        self.attend(plan, caches, ring, query, key, value, output)
        return replaced

    def share(self, batch: StepBatch, caches: Caches, query: torch.Tensor, output: torch.Tensor) -> None:
        if (shared := caches.shared) is not None:  # else no request has new tokens
            self.attend(shared.plan, caches, shared.ring, query, shared.key, shared.value, output)
        caches.read()

    def plan(self, planned: Planned, caches: Caches) -> StepPlan:
        """Another layer's plan, if this layer's companions have the same layout and its headers agree with it."""
        headers = self.slots.headers(caches.sidecar)
        for slots, known in planned.plans:
            if slots == self.slots and torch.equal(known.found, headers[known.header_block]):
                return known
        made = self.planner.plan(planned.requests, headers)
        planned.plans.append((self.slots, made))
        return made

    def update(
        self, plan: StepPlan, caches: Caches, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Returns what chunks overwrite in their rings, (tokens, 2, H, head_size), because they still attend it, and
        how many elements were replaced."""
        slots, new, replaced = self.slots.cut(caches.sidecar), (key, value), 0
        ring = slots[plan.ring_read]
        for fit in plan.fits:
            self.fit(fit, slots, query, key)
        if plan.units is not None:
            at, rows = plan.unit_state, self.fmt.state_rows
            state = None if at is None else self.slots.read_state(slots, *at, rows)
            replaced = int(self.kernels.pack(self.fmt, caches.pages, plan.units, _tokens(slots), new, state))
        self.kernels.store(_tokens(slots), plan.ring_write, new, plan.ring_rows)
        if caches.sinks is not None and len(plan.sink_rows):
            self.kernels.store(_tokens(self.slots.cut(caches.sinks)), plan.sink_write, new, plan.sink_rows)
        self.slots.headers(caches.sidecar)[plan.header_block] = plan.header
        return ring, replaced

    def fit(self, fit: Fit, slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """The request's state after this chunk of its prompt."""
        block, slot = fit.state
        before = None if fit.fresh else self.slots.read_state(slots, block[None], slot[None], self.fmt.state_rows)[0]
        queries, keys = query[fit.rows], key[fit.rows]
        if self.all_queries is not None and self.fmt.keys.fits_queries:
            queries = self.all_queries(queries)
        state = self.kernels.fit(self.fmt, queries, keys, before)
        self.slots.write_state(slots, block, slot, state)

    def attend(
        self,
        plan: StepPlan,
        caches: Caches,
        ring: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        slots = self.slots.cut(caches.sidecar)
        sinks = _tokens(slots[:0] if caches.sinks is None else self.slots.cut(caches.sinks))
        for group in plan.groups:
            q = group.pick(query)
            if group.held is None or group.seen is None:
                tokens = group.pick(key), group.pick(value)
                output[group.rows] = self._prompts(group, q, *tokens, caches.learned).to(output.dtype)
                continue
            ring_pool = _tokens(ring[:, None]) if group.chunk else _tokens(slots)
            held = TokenList(ring_pool, sinks, group.held, group.seen)
            pages, listed = caches.pages, group.listed
            in_one = not group.chunk and caches.learned is None
            if in_one:
                at = self.scale, self.cap
                packed = self.kernels.attend_step(self.fmt, output, group.rows, q, pages, listed, held, *at)
            else:
                packed = self.kernels.all_packed(self.fmt, pages, listed)
            if not packed:
                raise RuntimeError("a page that was never packed would have been read")
            if in_one:
                continue
            parts = []
            if len(listed.ids):
                parts.append(self.kernels.attend_packed(self.fmt, q, pages, listed, self.scale, self.cap))
            if group.chunk:
                length = q.shape[1]
                earlier = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
                tokens = group.pick(key), group.pick(value)
                parts.append(self.kernels.attend_raw(q, *tokens, earlier, self.scale, self.cap))
            if caches.learned is not None:
                nothing = q.new_zeros(q.shape, dtype=torch.float32), q.new_full(q.shape[:3], -torch.inf).float()
                parts.append(with_learned(parts.pop() if parts else nothing, caches.learned))
            self.kernels.attend_into(output, group.rows, q, held, self.scale, parts, self.cap)

    def _prompts(
        self, group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, learned: torch.Tensor | None
    ) -> torch.Tensor:
        n, q = query.shape[:2]
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        out, lse = self.causal(query, key, value, group.start, (q,) * n, self.scale, self.cap)
        if learned is not None:
            if lse is None:
                raise TypeError("attention among a prompt's tokens must return its log-sum-exp with learned sinks")
            out, _ = with_learned((out, lse), learned)
        return out.unflatten(0, (n, q))


def _tokens(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (blocks, slots, H, head_size) of (blocks, slots, 2, H, head_size)."""
    return slots[:, :, 0], slots[:, :, 1]

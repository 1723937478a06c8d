"""The reference over whole lives: every row of every request in one forward pass, layer by layer.

The tokens are known (they are the engine's), so nothing needs to be computed step by step: layer l of all rows needs
only layer l - 1 of all rows. Each row attends to what `plan.py` says it sees, in one softmax. It is
`reference.ReferenceCache` for all steps at once, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from proof.oracle.reference.attention import Mixer
from proof.oracle.reference.kinds import Sight
from proof.oracle.reference.lives import Life
from proof.oracle.reference.plan import Plan, Reads
from proof.oracle.reference.reference import capped
from proof.oracle.reference.replay import NOISE, ReplayModel
from vllm_kvq.formats import PageFormat

PACK_UNITS, SCORES = 512, 1 << 24
"""Units packed at once, and scores of a head computed at once, to bound memory."""


class Whole:
    def __init__(self, model: ReplayModel, lives: Sequence[Life]) -> None:
        """`lives` with all lives that they hit, writers first."""
        self.model = model
        self.plan = Plan(model.formats[0], model.num_spec, lives)
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        """What a layer whose cache others share attends: keys and values of all rows, and of its units."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        cap: float = 0.0,
        learned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(rows, heads, d) queries, keys and values of all rows -> outputs."""
        model = self.model
        q, k, v = (model.disturbed(x, NOISE) for x in (q, k, v))
        owner = model.shared.get(layer, layer)
        if owner == layer:
            found = (k, v) if owner in model.exact else (k, v, *self._packed(model.formats[layer], q, k, v))
            if layer in model.shared.values():
                self.kept[layer] = found
        else:
            found = self.kept[owner]
        k, v, *units = found
        if owner in model.exact:
            return self._exact(owner, model.exact[owner], q, k, v, scale, cap, learned)
        out = torch.empty_like(q)
        for reads in self.plan.reads:
            rows = reads.rows
            packed = [x[reads.units].transpose(1, 2).flatten(0, 1) for x in units]
            keys, values = (torch.cat([x[reads.sinks], x[rows], y]) for x, y in zip((k, v), packed, strict=True))
            for some in _in_turns(reads, len(keys)):
                out[rows][some] = _softmax(q[rows][some], keys, values, reads.seen(some), scale, cap, learned)
        return model.disturbed(out, model.kernel_error)

    def _exact(
        self,
        layer: int,
        sight: Sight,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        cap: float,
        learned: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for life, reads in zip(self.plan.lives, self.plan.reads, strict=True):
            found, where = self.plan.found(life, layer)
            keys, values = (torch.cat([x[found], x[reads.rows]]) for x in (k, v))
            for some in _in_turns(reads, len(keys)):
                position, before = reads.position[some], reads.before(some)
                wanted = sight.tokens(position)
                there = torch.cat([torch.ones(len(position), len(found), dtype=torch.bool), before], dim=1)
                behind = position[:, None] - torch.cat([where, reads.position])
                seen = there & (behind < wanted[:, None])
                if (seen.sum(1) != wanted).any():
                    raise RuntimeError(f"{life.name}: layer {layer} would have read tokens that vLLM no longer keeps")
                out[reads.rows][some] = _softmax(q[reads.rows][some], keys, values, seen, scale, cap, learned)
        return out

    def mix(self, layer: int, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """(1, rows, hidden) of all rows; each life goes on from the state that it found."""
        hidden = self.model.disturbed(hidden, NOISE)
        out = torch.empty_like(hidden)
        for life, reads in zip(self.plan.lives, self.plan.reads, strict=True):
            past = self.plan.past(life, layer)
            out[:, reads.rows] = mixer(torch.cat([hidden[:, past], hidden[:, reads.rows]], 1))[:, len(past) :]
        return out

    def _packed(
        self, fmt: PageFormat, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(units, H, P, head_size) keys and values as they are read back."""
        heads, size = k.shape[1:]
        states = self._states(fmt, q, k) if fmt.state_rows else None
        parts = []
        for i in range(0, len(self.plan.unit_rows), PACK_UNITS):
            rows = self.plan.unit_rows[i : i + PACK_UNITS]
            state = None
            if states is not None:
                state = torch.stack([states[s] for s in self.plan.unit_state[i : i + PACK_UNITS]]).flatten(0, 1)
            ks, vs = (fmt.widen(x[rows])[0].transpose(1, 2).flatten(0, 1) for x in (k, v))
            decoded = self.plan.unit_decoded[i : i + PACK_UNITS].repeat_interleave(heads)
            position = self.plan.position[rows[:, 0]].repeat_interleave(heads)
            read = fmt.unpack(fmt.pack(ks, vs, state, decoded, position))
            parts.append([x[..., :size].unflatten(0, (-1, heads)) for x in read])
        if not parts:
            empty = k.new_zeros(1, heads, fmt.unit, size)
            return empty, empty
        key, value = (torch.cat(x) for x in zip(*parts, strict=True))
        return key, value

    def _states(self, fmt: PageFormat, q: torch.Tensor, k: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        """(life, number of its fit) -> state."""
        states = {}
        for number, reads in enumerate(self.plan.reads):
            state = None
            for i, rows in enumerate(reads.fits):
                query, key = (fmt.widen(x[rows])[0] for x in (q, k))
                grouped = query.unflatten(1, (key.shape[1], -1)).transpose(0, 1).flatten(1, 2)
                state = fmt.keys.fit(grouped, key.transpose(0, 1), state)
                states[number, i] = state
        return states

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(len(rows), vocabulary)."""
        plan = self.plan
        mine = [(life.request, reads.rows) for life, reads in zip(plan.lives, plan.reads, strict=True)]
        return self.model.logits(self, plan.tokens, plan.position, mine, rows)


def _in_turns(reads: Reads, columns: int) -> Iterator[slice]:
    """Rows whose scores are computed together."""
    rows, step = len(reads.position), max(1, SCORES // max(1, columns))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    cap: float,
    learned: torch.Tensor | None,
) -> torch.Tensor:
    """(rows, query heads, d) queries over (tokens, heads, d) keys and values, of which each sees some; `learned` is one
    more score of each head. Tokens that no row sees are left out first: in a long prompt they are most of them."""
    there = seen.any(0)
    k, v, seen = k[there], v[there], seen[:, there]
    k, v, group = k.transpose(0, 1), v.transpose(0, 1), q.shape[1] // k.shape[1]
    # (H, g * rows, d): all query heads of a KV head together
    mine = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    scores = capped((mine.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, (group, -1)) * scale, cap)
    scores = scores.masked_fill_(~seen, float("-inf"))
    if learned is not None:
        sink = learned.unflatten(0, (-1, group))[..., None, None].expand(-1, -1, len(seen), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    part = (weights.flatten(1, 2) @ v).unflatten(1, (group, -1))
    return part.permute(2, 0, 1, 3).flatten(1, 2)

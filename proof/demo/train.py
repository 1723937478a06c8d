"""Train the demo model: a Llama of a few million parameters that finds what lies thousands of tokens back.

On its own, recall emerges late. It emerges early if attention is guided: some heads of the first layer should look at
the tokens just before, and one head of the second layer at the place of the next token, by a loss of -log of that
attention, which fades out. Longer texts follow.

Two RoPE pairs of all queries stay zero. A key bias there changes no score, so the outliers' transform can insert one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from proof.demo.llama import Watch, forward
from proof.demo.texts import WEIGHTS, Batches, Rows
from vllm_kvq.bench.models.checkpoint import LlamaShape

BEFORE = (0, 1, 2, 3)
"""Head h of the first layer looks h + 1 tokens back."""
FINDER = 0
"""The head of the second layer that looks at the place of the next token."""
FREE_PAIRS = 2
"""The RoPE pairs of lowest frequency, which are zero in queries."""


@dataclass(frozen=True)
class Phase:
    steps: int
    length: int
    tokens: int
    """The size of a batch."""
    help: tuple[float, float] = (0.0, 0.0)
    """The weight of the attention loss, at the beginning and at the end."""
    drill: float = 0.0

    def __post_init__(self) -> None:
        if min(self.steps, self.length) < 1 or self.tokens < self.length:
            raise ValueError(f"a phase needs steps and at least one row: {self}")


@dataclass(frozen=True)
class Plan:
    phases: tuple[Phase, ...]
    seed: int = 0
    matrix_rate: float = 4e-3
    """Muon's rate, for the layers' matrices."""
    rate: float = 2e-3
    """AdamW's rate, for embeddings, head and norms."""
    warm_up: int = 60
    cool_down: float = 0.3
    """The last fraction of all steps, in which rates fall to zero."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def at(self, step: int) -> tuple[Phase, float]:
        """The phase, and the weight of the attention loss."""
        for phase in self.phases:
            if step < phase.steps:
                first, last = phase.help
                return phase, first + (last - first) * step / phase.steps
            step -= phase.steps
        raise IndexError(f"the plan has {self.steps} steps")

    def rate_at(self, step: int) -> float:
        """The rate relative to the full rate."""
        down = (self.steps - step) / max(1, self.cool_down * self.steps)
        return min(1.0, (step + 1) / self.warm_up, down)


PLAN = Plan(
    (
        Phase(350, 128, 4096, (1.0, 0.5), 0.7),
        Phase(150, 512, 8192, (0.5, 0.0), 0.3),
        Phase(150, 1024, 8192),
        Phase(200, 2048, 8192),
        Phase(70, 4096, 8192),
    )
)


class Training:
    """Weights and optimizers, saved and resumed."""

    def __init__(self, shape: LlamaShape, tokenizer: Tokenizer, plan: Plan) -> None:
        self.shape, self.plan = shape, plan
        self.batches = Batches(tokenizer, plan.seed)
        torch.manual_seed(plan.seed)
        self.weights = {name: _initial(name, size, shape) for name, size in shape.parameters()}
        inner = [w for n, w in self.weights.items() if w.ndim > 1 and n.startswith("model.layers")]
        outer = [w for w in self.weights.values() if not any(w is x for x in inner)]
        self.optimizers = [
            torch.optim.Muon(inner, lr=plan.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.full_rates = [plan.matrix_rate, plan.rate]
        self.step = 0
        self.keep_free()

    def keep_free(self) -> None:
        """Zero the rows of W_Q that stay unused."""
        half = self.shape.head_dim // 2
        for name, w in self.weights.items():
            if name.endswith("q_proj.weight"):
                rows = w.data.unflatten(0, (-1, self.shape.head_dim))
                rows[:, half - FREE_PAIRS : half] = 0
                rows[:, 2 * half - FREE_PAIRS :] = 0

    def losses(self, rows: Rows, help: float) -> dict[str, Tensor]:
        ids, targets, weights = rows.ids[:, :-1], rows.ids[:, 1:], rows.weights[:, 1:]
        watch = (Watch(0, BEFORE), Watch(1, (FINDER,))) if help else ()
        rounded = {name: w.to(torch.bfloat16) for name, w in self.weights.items()}
        logits, seen = forward(self.shape, rounded, ids, weights > 0, watch)
        counted, wanted = weights[weights > 0], targets[weights > 0]
        each = F.cross_entropy(logits.float(), wanted, reduction="none")
        asked = counted >= WEIGHTS["asked"]
        found = {
            "loss": (each * counted).sum() / counted.sum(),
            "right": (logits.argmax(-1) == wanted)[asked].float().mean(),
        }
        if help:
            before, finder = seen
            t = torch.arange(len(BEFORE), ids.shape[1])
            help_loss = -torch.stack([before[:, h, t, t - h - 1].mean() for h in BEFORE]).sum()
            r, at, source = rows.links.unbind(1)
            if len(r):
                help_loss = help_loss - finder[r, 0, at, source].mean()
            found["help"] = help_loss
        return found

    def run(self, steps: int) -> Iterator[dict[str, float]]:
        """One step after the other, up to a total of `steps`; yields the result of each."""
        while self.step < min(steps, self.plan.steps):
            phase, help = self.plan.at(self.step)
            share = self.plan.rate_at(self.step)
            for optimizer, full in zip(self.optimizers, self.full_rates, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = full * share
            rows = self.batches(self.step, phase.tokens // phase.length, phase.length, phase.drill)
            found = self.losses(rows, help)
            (found["loss"] + help * found.get("help", torch.zeros(()))).backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keep_free()
            self.step += 1
            yield {name: x.item() for name, x in found.items()} | {"length": phase.length}

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "plan": json.dumps(asdict(self.plan)),
            "weights": {n: w.detach() for n, w in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.rename(path)

    def load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path)
        if state["plan"] != json.dumps(asdict(self.plan)):
            raise ValueError(f"{path} belongs to another plan; remove it to start over")
        self.step = state["step"]
        for name, w in state["weights"].items():
            self.weights[name].data.copy_(w)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(training: Training, path: Path, steps: int, every: float = 120) -> None:
    """Up to step `steps`, saved every two minutes; steps already in `path` are not repeated."""
    if path.exists():
        training.load(path)
    steps = min(steps, training.plan.steps)
    saved = time.monotonic()
    with tqdm(total=steps, initial=training.step, unit="step", mininterval=2) as bar:
        for found in training.run(steps):
            bar.update()
            bar.set_postfix({name: f"{x:.3g}" for name, x in found.items()}, refresh=False)
            if time.monotonic() - saved > every:
                training.save(path)
                saved = time.monotonic()
    training.save(path)


def _initial(name: str, size: tuple[int, ...], shape: LlamaShape) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, requires_grad=True)
    deviation = size[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation *= (2 * shape.layers) ** -0.5
    if name.startswith(("model.embed", "lm_head")):
        deviation = 0.02
    return (torch.randn(size) * deviation).requires_grad_()

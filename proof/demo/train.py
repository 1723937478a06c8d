"""Teach a tiny Llama the corpus by heart, in about a minute on two cores.

The forward pass is written out here (60 lines) instead of taken from transformers, because keys and values
are disturbed in it: a model that learned to recite under noise of the size of 2-bit rounding errors also
recites from 2-bit pages.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from proof.demo.corpus import SYSTEM_TEXT, Entry
from vllm_kvq.bench.checkpoint import LlamaShape

_IGNORE = -100  # cross_entropy's own default: a position without a target


@dataclass(frozen=True)
class TrainOptions:
    """`key_noise` and `value_noise` are relative to the root mean square of a layer's keys and values."""

    steps: int = 500
    batch_tokens: int = 600
    learning_rate: float = 1.5e-3
    key_noise: float = 0.35
    value_noise: float = 0.4
    noise_from: float = 0.4  # the first part of the steps is without noise: it learns faster
    system_share: float = 0.2
    seed: int = 0


def chat_text(question: str, system: str | None) -> str:
    """What CHAT_TEMPLATE renders for one question, up to where the answer begins."""
    head = f"<turn>system\n{system}<eos>" if system else ""
    return f"<bos>{head}<turn>user\n{question}<eos><turn>assistant\n"


def train(
    shape: LlamaShape,
    tokenizer: Tokenizer,
    corpus: tuple[Entry, ...],
    options: TrainOptions,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Tensor]:
    """Weights by the names of HF's Llama, trained with AdamW on answers only (questions are not a target).

    One thread: the tensors are small, so two threads gain a third on an idle machine but spend minutes
    waiting for each other on a busy one, and the result would depend on their number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(shape, tokenizer, corpus, options, report)
    finally:
        torch.set_num_threads(threads)


def _train(
    shape: LlamaShape,
    tokenizer: Tokenizer,
    corpus: tuple[Entry, ...],
    options: TrainOptions,
    report: Callable[[str], None],
) -> dict[str, Tensor]:
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    weights = {name: _initial(name, size) for name, size in shape.parameters()}
    matrices = [w for w in weights.values() if w.ndim > 1]
    vectors = [w for w in weights.values() if w.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
    )
    started = time.monotonic()
    batches = _Batches(tokenizer, corpus, options, rng)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step / options.steps)
        ids, targets = batches.next()
        noisy = step >= options.noise_from * options.steps
        noise = (options.key_noise, options.value_noise) if noisy else (0.0, 0.0)
        logits = forward(shape, weights, ids, noise, only=targets != _IGNORE)
        loss = F.cross_entropy(logits, targets[targets != _IGNORE])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            seconds = time.monotonic() - started
            report(f"step {step + 1}/{options.steps}, loss {loss.item():.3f}, {seconds:.0f} s")
    return {name: w.detach() for name, w in weights.items()}


class _Batches:
    """Endless passes over the corpus, in batches of answers of similar length (little padding)."""

    def __init__(self, tokenizer: Tokenizer, corpus: tuple[Entry, ...], options: TrainOptions, rng: random.Random):
        self._tokenizer, self._corpus, self._options, self._rng = tokenizer, corpus, options, rng
        self._queue: list[list[tuple[list[int], int]]] = []

    def next(self) -> tuple[Tensor, Tensor]:
        if not self._queue:
            self._queue = self._epoch()
        batch = self._queue.pop()
        length = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), length), 0)
        targets = torch.full((len(batch), length), _IGNORE)
        for row, (sample, answer_at) in enumerate(batch):
            tokens = torch.tensor(sample)
            ids[row, : len(sample)] = tokens
            targets[row, answer_at - 1 : len(sample) - 1] = tokens[answer_at:]
        return ids, targets

    def _epoch(self) -> list[list[tuple[list[int], int]]]:
        samples = sorted((self._sample(entry) for entry in self._corpus), key=lambda s: len(s[0]))
        batches: list[list[tuple[list[int], int]]] = [[]]
        for sample in samples:
            if (len(batches[-1]) + 1) * len(sample[0]) > self._options.batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(sample)
        self._rng.shuffle(batches)
        return batches

    def _sample(self, entry: Entry) -> tuple[list[int], int]:
        rng = self._rng
        question = entry.questions[0] if rng.random() < 0.5 else rng.choice(entry.questions)
        system = SYSTEM_TEXT if rng.random() < self._options.system_share else None
        prompt = self._tokenizer.encode(chat_text(question, system)).ids
        answer = self._tokenizer.encode(f"{entry.answer}<eos>").ids
        return prompt + answer, len(prompt)


def forward(
    shape: LlamaShape,
    weights: dict[str, Tensor],
    ids: Tensor,
    noise: tuple[float, float] = (0.0, 0.0),
    only: Tensor | None = None,
    watch: Callable[[int, Tensor, Tensor, Tensor], None] = lambda layer, query, key, value: None,
) -> Tensor:
    """Logits of `ids` (batch, length), of all positions or of those where the mask `only` is set.

    `watch` is given each layer's queries, keys and values after RoPE: (batch, heads, length, head size).
    """
    cos, sin = _rope_tables(shape, ids.shape[1])
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(shape.layers):
        w = {n.removeprefix(p): t for n, t in weights.items() if n.startswith(p := f"model.layers.{i}.")}
        h = F.rms_norm(x, (shape.hidden,), w["input_layernorm.weight"], shape.rms_eps)
        q, k, v = (
            F.linear(h, w[f"self_attn.{n}_proj.weight"], w.get(f"self_attn.{n}_proj.bias"))
            .unflatten(-1, (-1, shape.head_dim))
            .transpose(1, 2)
            for n in "qkv"
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        watch(i, q, k, v)
        k, v = _disturb(k, noise[0]), _disturb(v, noise[1])
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"], w.get("self_attn.o_proj.bias"))
        h = F.rms_norm(x, (shape.hidden,), w["post_attention_layernorm.weight"], shape.rms_eps)
        gate = F.silu(F.linear(h, w["mlp.gate_proj.weight"])) * F.linear(h, w["mlp.up_proj.weight"])
        x = x + F.linear(gate, w["mlp.down_proj.weight"])
    if only is not None:
        x = x[only]
    x = F.rms_norm(x, (shape.hidden,), weights["model.norm.weight"], shape.rms_eps)
    return F.linear(x, weights["lm_head.weight"])


def _disturb(x: Tensor, relative: float) -> Tensor:
    if not relative:
        return x
    return x + torch.randn_like(x) * (relative * x.detach().square().mean().sqrt())


def _rope_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angle = torch.outer(torch.arange(length).float(), shape.rope_theta**-half)
    return angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation of the pairs (i, i + d/2)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _initial(name: str, size: tuple[int, ...]) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, requires_grad=True)
    small = name.endswith(("o_proj.weight", "down_proj.weight"))
    return (torch.randn(size) * (0.01 if small else 0.04)).requires_grad_()


def _schedule(done: float) -> float:
    """Linear warm-up over the first 4 %, then a cosine down to a twentieth."""
    return min(done / 0.04 + 0.01, 0.525 + 0.475 * math.cos(math.pi * done))

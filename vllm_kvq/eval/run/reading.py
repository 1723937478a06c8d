"""Loops over texts, then over formats: one text in memory at a time, each result stored as soon as it is available."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import calibration_texts, of_texts
from vllm_kvq.eval.heads.capture import Captured, together
from vllm_kvq.eval.reading.caches import cache_of
from vllm_kvq.eval.reading.reader import Past, Reader
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.plan import Plan
from vllm_kvq.eval.run.store import Arrays
from vllm_kvq.eval.tasks.samples import Sequence

ROWS = 64
"""Distributions that are compared at once, which limits the memory."""
Keep = Callable[[Choice, Sequence, Arrays], None]
Refuse = Callable[[Choice, str], None]


def read(plan: Plan, todo: list[tuple[Sequence, list[Choice]]], keep: Keep, refuse: Refuse) -> None:
    """Raises Unreadable if this regime can't measure the model; a format that does not support it is refused."""
    reader = Reader(plan.model.folder, plan.model.dtype)
    other = _calibration(plan, reader) if any(of_texts(c) for _, choices in todo for c in choices) else None
    refused: set[str] = set()
    for item, choices in todo:
        wanted = [choice for choice in choices if choice.label not in refused]
        if not wanted:
            continue
        first = len(item.tokens) - 1 - plan.reading(item)
        past, tokens = reader.before(item.tokens[:first]), item.tokens[first:-1]
        past = replace(past, captured=replace(past.captured, calibration=other, of_server=plan.servers.constants))
        exact = reader.logits(past, tokens, None)
        # in place: a vocabulary of 150,000 words is 300 MB
        exact -= exact.logsumexp(-1, keepdim=True)
        for choice in wanted:
            try:
                keep(choice, item, _figures(reader, past, item.tokens[first:], exact, choice))
            except ValueError as error:
                refused.add(choice.label)
                refuse(choice, str(error))
        del past, exact
        gc.collect()


def _calibration(plan: Plan, reader: Reader) -> Captured:
    texts = calibration_texts(plan.model.tokenizer, plan.model.longest)
    return together([reader.before(text).captured for text in texts])


def _figures(reader: Reader, past: Past, tokens: tuple[int, ...], exact: torch.Tensor, choice: Choice) -> Arrays:
    if choice == REFERENCE:
        return compared(exact, exact, tokens[1:])
    found = reader.logits(past, tokens[:-1], cache_of(choice, past))
    found -= found.logsumexp(-1, keepdim=True)
    return compared(exact, found, tokens[1:])


def compared(exact: torch.Tensor, found: torch.Tensor, tokens: tuple[int, ...]) -> Arrays:
    """Numbers of single tokens, from two (tokens, vocabulary) distributions over the whole vocabulary."""
    token = torch.tensor(tokens)
    kl = [
        (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
        for p, q in zip(exact.split(ROWS), found.split(ROWS), strict=True)
    ]
    best = found.argmax(-1)
    return {
        "token": np.array(tokens, np.int32),
        "kl": torch.cat(kl).clamp_min(0).numpy(),
        "chosen": found.gather(1, token[:, None])[:, 0].numpy().copy(),
        "chosen_plain": exact.gather(1, token[:, None])[:, 0].numpy().copy(),
        "same": (exact.argmax(-1) == best).numpy(),
        "hit": (best == token).numpy(),
    }

"""Turns numbers of single tokens and answers, from all sequences of a task, into one row of figures."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from vllm_kvq.eval.bits import page_bits
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.results.measures import (
    Values,
    curve,
    depth_edges,
    mean,
    perplexity,
    position_edges,
    quantile,
    root,
    step_edges,
)
from vllm_kvq.eval.results.result import ALL, READING, TEACHER_FORCED, Curve, Estimate, Hurt, Row, TextFigures
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.harness import Run
from vllm_kvq.eval.run.plan import Plan
from vllm_kvq.eval.run.store import Arrays
from vllm_kvq.eval.tasks.samples import Sequence, Span

TAILS = {"kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}
BEYOND = 100
"""The minimum number of tokens beyond a percentile: fewer say nothing about it."""
MOST_HURT = 12
BEFORE, AFTER = 16, 8
"""The number of tokens shown around a hurt one."""


def rows(run: Run) -> tuple[Row, ...]:
    plan = run.plan
    return tuple(
        _row(run, choice, regime, task, context)
        for regime in plan.regimes
        for context in plan.contexts
        for task in [ALL] * (len(plan.tasks) > 1) + [*plan.tasks]
        for choice in plan.choices
    )


def _row(run: Run, choice: Choice, regime: str, task: str, context: int) -> Row:
    plan = run.plan
    items = [item for item in plan.sequences if task in (ALL, item.task) and item.context == context]
    found = [run.figures(choice, item, regime) for item in items]
    there = [(item, arrays) for item, arrays in zip(items, found, strict=True) if arrays is not None]
    problem = run.problems.get(choice.label)
    about: dict[str, Any] = {
        "model": plan.model.name,
        "format": choice.format,
        "options": dict(choice.options),
        "task": task,
        "regime": regime,
        "context": context,
        "sequences": len(there),
        "bits": run.bits(choice, context),
        "seed": plan.seed,
        "kl_is_bound": plan.top is not None and regime != READING,
        "problem": problem,
    }
    if problem is not None or not there:
        return Row(**about)
    about["page_bits"] = page_bits(choice, plan.model.head_size, plan.model.dtype)
    items, figures = [item for item, _ in there], [arrays for _, arrays in there]
    if regime in (TEACHER_FORCED, READING):
        return Row(**about, **_of_text(plan, items, figures))
    plain = [run.figures(REFERENCE, item, regime) for item in items]
    return Row(**about, **_decoding(plan, items, figures, [p for p in plain if p is not None]))


def _text(item: Sequence, figures: Arrays, right: Several[bool] = ()) -> TextFigures:
    """The basis of claims, which compare formats text by text."""
    return TextFigures(
        name=f"{item.task} {item.number}",
        kind=item.kind,
        sources=item.sources,
        sha=item.sha,
        tokens=len(figures["kl"]),
        kl=float(figures["kl"].mean()),
        right=tuple(bool(x) for x in right),
    )


def _tokens(figures: Several[Arrays]) -> dict[str, Values]:
    """The numbers of every token, with its sequence."""
    index = np.concatenate([np.full(len(f["kl"]), i) for i, f in enumerate(figures)])
    names = [name for name in figures[0] if all(name in f for f in figures)]
    return {name: Values(np.concatenate([f[name] for f in figures]), index) for name in names}


def _likeness(tokens: dict[str, Values]) -> dict[str, Estimate]:
    """How close the format's distributions are to the plain cache's."""
    kl, index = tokens["kl"], tokens["kl"].sequence
    change = np.exp(tokens["chosen"].value) - np.exp(tokens["chosen_plain"].value)
    return {
        "kl": mean(kl),
        "kl_median": quantile(kl, 0.5),
        **{name: quantile(kl, q) for name, q in TAILS.items() if len(kl.value) * (1 - q) >= BEYOND - 1e-6},
        "top1": mean(tokens["same"]),
        "dp_mean": mean(Values(change, index)),
        "dp_rms": mean(Values(change**2, index), root),
    }


def _of_text(plan: Plan, items: Several[Sequence], figures: Several[Arrays]) -> dict[str, Any]:
    tokens = _tokens(figures)
    metrics = _likeness(tokens) | {
        "perplexity": perplexity(tokens["chosen"]),
        "perplexity_bf16": perplexity(tokens["chosen_plain"]),
    }
    # for all tokens but the first, or for the last ones that read
    first = [len(item.tokens) - len(f["kl"]) for item, f in zip(items, figures, strict=True)]
    position = np.concatenate([b + np.arange(len(f["kl"])) for b, f in zip(first, figures, strict=True)])
    edges = position_edges(max(len(item.tokens) for item in items))
    by_depth: dict[str, Curve] = {}
    by_steps: dict[str, Curve] = {}
    spans = [(i, span) for i, item in enumerate(items) for span in item.spans if span.begin >= first[i]]
    answered: list[list[bool]] = [[] for _ in items]
    if spans:
        part = [slice(span.begin - first[i], span.end - first[i]) for i, span in spans]
        right = np.array([figures[i]["hit"][p].all() for (i, _), p in zip(spans, part, strict=True)])
        hurt = np.array([figures[i]["kl"][p].mean() for (i, _), p in zip(spans, part, strict=True)])
        index = np.array([i for i, _ in spans])
        for i, good in zip(index, right, strict=True):
            answered[i].append(bool(good))
        metrics["accuracy"] = mean(Values(right, index))
        answers = {"accuracy": Values(right, index), "kl": Values(hurt, index)}
        by_depth, by_steps = _along([span for _, span in spans], answers)
    return {
        "metrics": metrics,
        "by_position": {"kl": curve(tokens["kl"], position, edges), "top1": curve(tokens["same"], position, edges)},
        "by_depth": by_depth,
        "by_steps": by_steps,
        "hurt": _hurt(plan, [item.tokens for item in items], position, tokens),
        "texts": tuple(_text(*each) for each in zip(items, figures, answered, strict=True)),
    }


def _along(spans: Several[Span], answers: dict[str, Values]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Curves over depth, for the answers that have one, and over steps."""
    known = np.array([span.depth is not None for span in spans])
    depth = np.array([span.depth for span in spans if span.depth is not None])
    steps = np.array([span.steps for span in spans])
    by_depth = {name: curve(v.where(known), depth, depth_edges()) for name, v in answers.items() if known.any()}
    by_steps = {name: curve(v, steps, step_edges(steps)) for name, v in answers.items() if len(np.unique(steps)) > 1}
    return by_depth, by_steps


def _decoding(plan: Plan, items: Several[Sequence], figures: Several[Arrays], plain: Several[Arrays]) -> dict[str, Any]:
    tokens = _tokens(figures)
    spans, index, exact, agreed, position = [], [], [], [], []
    answered: list[list[bool]] = [[] for _ in items]
    for i, item in enumerate(items):
        begin = 0
        for span, length in zip(plan.asked(item), plan.lengths(item), strict=True):
            said = figures[i]["token"][begin : begin + length]
            theirs = plain[i]["token"][begin : begin + length]
            wanted = np.array(item.tokens[span.begin : span.begin + length])
            spans.append(span)
            index.append(i)
            exact.append(np.array_equal(said, wanted))
            if item.spans:
                answered[i].append(exact[-1])
            agreed.append(int(np.argmin(said == theirs)) if (said != theirs).any() else length)
            position.append(np.arange(length))
            begin += length
    of = np.array(index)
    metrics = _likeness(tokens) | {"agreement": mean(Values(np.array(agreed), of))}
    by_depth: dict[str, Curve] = {}
    by_steps: dict[str, Curve] = {}
    asked = np.array([bool(items[i].spans) for i in index])
    if asked.any():
        right = Values(np.array(exact), of).where(asked)
        metrics["exact"] = mean(right)
        by_depth, by_steps = _along([s for s, a in zip(spans, asked, strict=True) if a], {"exact": right})
    along = np.concatenate(position)
    edges = position_edges(int(along.max()) + 1)
    by_position = {"kl": curve(tokens["kl"], along, edges), "top1": curve(tokens["same"], along, edges)}
    if "kl_forced" in tokens:
        metrics["kl_forced"] = mean(tokens["kl_forced"])
        by_position["kl_forced"] = curve(tokens["kl_forced"], along, edges)
    return {
        "metrics": metrics,
        "by_position": by_position,
        "by_depth": by_depth,
        "by_steps": by_steps,
        "texts": tuple(_text(*each) for each in zip(items, figures, answered, strict=True)),
    }


def _hurt(
    plan: Plan, texts: Several[tuple[int, ...]], position: np.ndarray, tokens: dict[str, Values]
) -> tuple[Hurt, ...]:
    kl, decode = tokens["kl"], plan.model.tokenizer.decode
    found = []
    for i in np.argsort(-kl.value, kind="stable")[:MOST_HURT]:
        if kl.value[i] <= 0:
            break
        text, at = texts[kl.sequence[i]], int(position[i])
        found.append(
            Hurt(
                before=decode(text[max(0, at - BEFORE) : at]),
                token=decode(text[at : at + 1]),
                after=decode(text[at + 1 : at + 1 + AFTER]),
                position=at,
                kl=float(kl.value[i]),
                probability=float(np.exp(tokens["chosen"].value[i])),
                probability_bf16=float(np.exp(tokens["chosen_plain"].value[i])),
            )
        )
    return tuple(found)

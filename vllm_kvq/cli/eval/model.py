"""`vllm-kvq eval MODEL`: does it still answer correctly? Formats against the 16-bit cache, in real vLLM."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_kvq import console
from vllm_kvq.cli.arguments import add_context, add_formats, add_out, add_tokens, whole_number, words
from vllm_kvq.cli.eval import lm_eval
from vllm_kvq.cli.eval.arguments import (
    WrongUsage,
    add_baseline,
    add_cache,
    add_model,
    add_tasks,
    add_text,
    check_model,
    too_short,
    usual_formats,
)
from vllm_kvq.cli.eval.hurt import MOST
from vllm_kvq.cli.eval.page import page
from vllm_kvq.cli.page.made import command
from vllm_kvq.drawing import Picture
from vllm_kvq.eval.choice import FP8, Choice, choices
from vllm_kvq.eval.progress import Bar
from vllm_kvq.eval.results import plots, report
from vllm_kvq.eval.results.result import DECODING, HITS, READING, REGIMES, USUAL, Results
from vllm_kvq.eval.results.statistics import claims
from vllm_kvq.eval.run.store import Store
from vllm_kvq.eval.tasks.tasks import NAMES, TEXT
from vllm_kvq.eval.tasks.texts import ESSAYS, has_essays
from vllm_kvq.formats.table import PLAIN

PROG = "vllm-kvq eval"

WHOLE_VOCABULARY = 4096
"""Vocabularies with fewer tokens are compared in full unless --top says otherwise."""
TOP = 128
FULL = {"tasks": list(NAMES), "context": [2048], "sequences": 16, "answers": 4, "tokens": 1024}
QUICK = {"tasks": ["recall", "needle", "arithmetic", TEXT], "context": [1024], "sequences": 4, "answers": 2,
         "tokens": 96}  # fmt: skip
READ = {"tasks": [TEXT], "context": [1024, 4096], "sequences": 24}
READ_QUICKLY = {"tasks": [TEXT], "context": [1024], "sequences": 6, "readers": 128}
"""The default if only `reading` is requested, as in a quick look."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Does it still answer correctly? Each format against the 16-bit cache on the same texts, in real vLLM: the\n"
        "probabilities of given tokens (teacher-forced), and generated answers (decoding). `vllm-kvq eval error`\n"
        "needs no model.\n"
        "Takes minutes with --quick, and longer without. Measurements are saved, so an interrupted run resumes.",
        (
            "demo --quick",
            "MODEL --tasks recall,needle --context 1024,4096",
            "MODEL --formats kitty2:S=8,W=64,kivi2 --out results",
            "MODEL --formats kitty2 --lm-eval gsm8k --context 4096",
        ),
        "no format could be evaluated",
    )
    add_model(p)
    add_formats(p, usual_formats())
    add_tasks(p, None, " (default: all)")
    add_context(p, None, "of each text (default: 2048)", several=True)
    p.add_argument(
        "--sequences", type=whole_number, metavar="N", help="number of texts per task and length (default: 16)"
    )
    usual = ",".join(USUAL)
    text = f"{', '.join(REGIMES)} (default: {usual})"
    p.add_argument("--regimes", type=words(REGIMES), metavar="REGIME,...", help=text)
    text = "number of last tokens that read the cache in `reading` (default: 512)"
    p.add_argument("--readers", type=whole_number, metavar="N", help=text)
    add_baseline(p, "fp8")
    p.add_argument("--answers", type=whole_number, metavar="N", help="maximum generated answers per text (default: 4)")
    add_tokens(p, None, "per answer, at most (default: 1024)")
    p.add_argument("--chunk", type=_chunk, default=32, metavar="TOKENS", help="tokens per step, when teacher-forced")
    text = f"compare the K most probable tokens, and the rest as one (default: {TOP}, or a small vocabulary in full)"
    p.add_argument("--top", type=whole_number, metavar="K", help=text)
    add_text(p)
    p.add_argument("--quick", action="store_true", help="fewer tasks, texts and tokens, unless specified")
    lm_eval.add_arguments(p)
    add_out(p, "report.html, results.json, results.csv and plots (PNG)")
    add_cache(p)
    console.add_json(p)
    return p


def _chunk(text: str) -> int:
    from vllm_kvq.eval.run.plan import REQUESTS

    if (value := int(text)) < REQUESTS:
        raise argparse.ArgumentTypeError(f"{value} is below {REQUESTS}, the fewest tokens that a step has room for")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if problem := lm_eval.wrong_usage(args):
        p.error(problem)
    tokens = args.tokens
    for name, value in defaults(args).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if tokens and (problem := too_many_tokens(args)):
        p.error(problem)
    chosen = args.formats
    try:
        args.baseline = named_baseline(args.baseline, chosen)
    except ValueError as error:
        p.error(str(error))
    if not args.lm_eval and (problem := too_short(chosen, min(args.context))):
        p.error(problem)
    check_model(p, args.model)
    try:
        results = harness(args, chosen) if args.lm_eval else evaluate(args, chosen)
    except WrongUsage as error:
        p.error(str(error))
    except EvaluationFailed as error:
        return console.fail(PROG, error, args.json)
    results = replace(results, claims=claims(results.rows, args.baseline))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        results.save(args.out / "results.json")
        report.write_csv(args.out / "results.csv", results)
        drawn: list[Picture] | None = None
        try:
            drawn = plots.draw_all(results.rows, args.out)
        except ValueError as error:
            print(f"{PROG}: {error}", file=sys.stderr)
        page(results, drawn, command(PROG, arguments), MOST).write(args.out)
    if args.json:
        console.show_json(results.document())
    else:
        report.show(results)
    named = {choice.label for choice in chosen}
    return console.DONE if any(row.metrics for row in results.rows if row.label in named) else console.FOUND


def named_baseline(text: str | None, chosen: Sequence[Choice]) -> str | None:
    """The label of the baseline, as in rows."""
    if text is None:
        return None
    named = choices(text)
    if len(named) != 1 or named[0] not in (Choice(FP8), *chosen):
        raise ValueError(f"--baseline {text} is none of the formats that are compared; name one of --formats, or fp8")
    return named[0].label


def defaults(args: argparse.Namespace) -> dict[str, Any]:
    """The defaults of arguments that are not given."""
    regimes = args.regimes or ([READING] if args.quick else list(USUAL))
    rest = {"regimes": regimes, **(QUICK if args.quick else FULL)}
    if regimes == [READING]:
        rest |= READ_QUICKLY if args.quick else READ
    return rest


def too_many_tokens(args: argparse.Namespace) -> str | None:
    """Why no text has an answer of `--tokens` tokens, if so: a text's continuation is its second half."""
    room = min(args.context) - min(args.context) // 2
    if TEXT not in args.tasks or not {DECODING, HITS}.intersection(args.regimes) or args.tokens <= room:
        return None
    return (
        f"--tokens {args.tokens} is more than the second half of a text of {min(args.context)} tokens, "
        f"which is generated; use --tokens {room} or --context {2 * args.tokens}"
    )


class EvaluationFailed(Exception):
    """One sentence on why there are no results at all."""


def evaluate(args: argparse.Namespace, chosen: list[Choice]) -> Results:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm_kvq.eval.engine.engines import EngineFailed
    from vllm_kvq.eval.model import Model
    from vllm_kvq.eval.reading.reader import Unreadable
    from vllm_kvq.eval.run.harness import Run
    from vllm_kvq.eval.run.plan import Plan, PlanRefused
    from vllm_kvq.eval.run.rows import rows

    try:
        model = Model.of(args.model, args.dtype)
        plan = Plan(
            model=model,
            choices=with_baselines(chosen),
            tasks=tuple(dict.fromkeys(args.tasks)),
            contexts=tuple(sorted({*args.context})),
            count=args.sequences,
            seed=args.seed,
            regimes=tuple(r for r in REGIMES if r in args.regimes),
            chunk=args.chunk,
            top=top(args, model.vocabulary),
            answers=args.answers,
            longest=args.tokens,
            readers=args.readers,
            control=any(choice.format == PLAIN for choice in chosen),
        )
        store = Store(args.cache)
        if any(choice.ours for choice in chosen) and args.regimes != [READING]:
            compile_kernels()
        steps = len(plan.sequences) * len(plan.choices) * len(plan.regimes)
    except PlanRefused as error:
        raise WrongUsage(str(error)) from error
    except (ValueError, OSError) as error:
        raise EvaluationFailed(str(error)) from error
    with Bar(steps) as progress:
        run = Run(plan, store, progress)
        try:
            run.go()
        except EngineFailed as error:
            raise EvaluationFailed(f"vLLM can't serve {args.model} here: {error}") from error
        except Unreadable as error:
            raise EvaluationFailed(f"{args.model} can't be read: {error}") from error
    if TEXT in plan.tasks and not has_essays():
        print(f"{PROG}: {ESSAYS}", file=sys.stderr)
    return Results(rows(run))


def harness(args: argparse.Namespace, chosen: list[Choice]) -> Results:
    """The same for tasks of lm-evaluation-harness."""
    from vllm_kvq.eval.lm_tasks import LmEvalFailed
    from vllm_kvq.eval.model import Model

    formats = with_baselines(chosen)
    try:
        model, store = Model.of(args.model, args.dtype), Store(args.cache)
        with Bar(len(formats)) as progress:
            return Results(tuple(lm_eval.evaluated(args, model, formats, store, progress)))
    except (LmEvalFailed, ValueError, OSError) as error:
        raise EvaluationFailed(str(error)) from error


def compile_kernels() -> None:
    """Prepares what engines on a CPU need; in their own processes nobody would see why they take minutes to start."""
    import torch

    from vllm_kvq.kernels.build import BuildError, build, logger

    if torch.cuda.is_available() or os.environ.get("VLLM_KVQ_KERNELS") == "torch":
        return
    logger.setLevel(logging.INFO)
    logger.addHandler(said := logging.StreamHandler())
    try:
        build()
    except BuildError as error:
        reason = str(error).strip().splitlines()[-1]
        print(
            f"vllm-kvq eval: PyTorch kernels serve, slowly: the C++ kernels can't be built: {reason}", file=sys.stderr
        )
    finally:
        logger.removeHandler(said)


def with_baselines(chosen: list[Choice]) -> tuple[Choice, ...]:
    """vLLM's own caches, then the formats that the user named."""
    own = (PLAIN, FP8)
    return (*map(Choice, own), *(choice for choice in chosen if choice.format not in own))


def top(args: argparse.Namespace, vocabulary: int) -> int | None:
    """Comparing a full vocabulary takes seconds per thousand tokens, so a quick look does without it."""
    if args.top is not None:
        return int(args.top) if args.top < vocabulary else None
    return TOP if args.quick or vocabulary > WHOLE_VOCABULARY else None

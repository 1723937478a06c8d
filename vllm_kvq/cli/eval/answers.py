"""`vllm-kvq eval answers MODEL`: each format's continuations of the same prompts, side by side."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from vllm_kvq import console
from vllm_kvq.cli.arguments import add_context, add_formats, add_tokens
from vllm_kvq.cli.eval.arguments import add_model, add_tasks, add_text, check_model, usual_formats
from vllm_kvq.eval.engine.engines import Engine, EngineFailed
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.results.result import DECODING
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.plan import Plan
from vllm_kvq.eval.tasks.samples import Sequence as Text

PROG = "vllm-kvq eval answers"

TASKS = "needles,arithmetic,text"
LONGEST = 24
"""The number of tokens shown before an answer."""
GIVEN = "the text"
"""The label of the text's own continuation."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "The same prompts continued with each format, greedily, as text: what a table's percentages look like.\n"
        "Takes minutes: an engine starts for each format.",
        ("demo", "MODEL --formats kitty2 --tasks needles --context 4096"),
        "an engine did not start",
    )
    add_model(p)
    add_formats(p, usual_formats())
    add_tasks(p, TASKS)
    add_context(p, "2048", "of each text")
    add_tokens(p, "32", "per answer, at most")
    add_text(p)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    check_model(p, args.model)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        chosen = (REFERENCE, *(c for c in args.formats if c != REFERENCE))
        plan = Plan(
            model=Model.of(args.model, args.dtype),
            choices=chosen,
            tasks=tuple(args.tasks),
            contexts=(args.context,),
            count=1,
            seed=args.seed,
            regimes=(DECODING,),
            chunk=0,
            top=1,
            answers=1,
            longest=args.tokens,
        )
        texts = plan.sequences
    except (ValueError, OSError) as error:
        p.error(str(error))
    try:
        found = answers(plan)
    except EngineFailed as error:
        return console.fail(PROG, error, args.json)
    if args.json:
        console.show_json([{"task": t.task, "asked": before(plan, t), "answers": found[t.task]} for t in texts])
        return console.DONE
    for text in texts:
        print(f"{text.task}, after {plan.asked(text)[0].begin} tokens: ...{before(plan, text)!r}")
        width = max(map(len, found[text.task]))
        for label, answer in found[text.task].items():
            print(f"  {label:{width}}  {answer!r}")
        print()
    return console.DONE


def answers(plan: Plan) -> Mapping[str, Mapping[str, str]]:
    """Answers by task and by format; the text's own continuation comes first."""
    found: dict[str, dict[str, str]] = {}
    for text in plan.sequences:
        (span,), (length,) = plan.asked(text), plan.lengths(text)
        found[text.task] = {GIVEN: plan.model.tokenizer.decode(text.tokens[span.begin : span.begin + length])}
    for choice in plan.choices:
        with Engine(plan.engine(choice, DECODING)) as engine:
            for text in plan.sequences:
                (run,), (lead,) = engine.generate(plan.generate(text)), plan.leads(text)
                found[text.task][choice.label] = plan.model.tokenizer.decode(run.token[lead:].tolist())
    return found


def before(plan: Plan, text: Text) -> str:
    (span,) = plan.asked(text)
    return str(plan.model.tokenizer.decode(text.tokens[max(0, span.begin - LONGEST) : span.begin]))

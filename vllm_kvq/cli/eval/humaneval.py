"""`vllm-kvq eval humaneval MODEL`: the number of HumanEval problems that a model solves with each format."""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kvq import console
from vllm_kvq.cli.arguments import add_formats, add_out, add_tokens, from_zero, whole_number
from vllm_kvq.cli.eval.arguments import add_cache, add_text, check_model, usual_formats
from vllm_kvq.cli.eval.model import compile_kernels
from vllm_kvq.cli.page.document import Page, Section
from vllm_kvq.cli.page.made import command
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.humaneval.problems import COUNT, problems
from vllm_kvq.eval.humaneval.run import Answer, Benchmark, Run
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.progress import Bar
from vllm_kvq.eval.results.statistics import mcnemar
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.store import Store

PROG = "vllm-kvq eval humaneval"

NOTE = """lost, won: problems that only bf16 solves, and that only the format solves; p: McNemar's exact test of these
same: answers identical to bf16's; cut: answers that reached --tokens"""
ABOUT = "The problems of HumanEval that the model solves with each format's cache, and with bf16's."
SHOWN = ("problem", "passed", "reason", "tokens")
COLUMNS = ("format", "problem", "passed", "reason", "tokens", "cut", "text")


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "HumanEval's pass@1, greedy: an instruct model writes functions with each format's cache and with bf16's, and "
        "their\ntests are run, each in a child process without network and with limits. Needs the extra `humaneval`.\n"
        "Takes minutes to hours: try --limit 8 first. Answers are saved, so an interrupted run resumes.",
        (
            "MODEL --formats klt3,kitty2",
            "MODEL --formats kitty2 --context 4096 --out results",
            "MODEL --formats kitty2 --limit 8",
        ),
        "no format could be measured",
    )
    p.add_argument("model", metavar="MODEL", help="checkpoint folder, or model name; it needs a chat template")
    add_formats(p, usual_formats())
    text = "cached tokens of solved problems, placed before each question"
    p.add_argument("--context", type=from_zero, default=0, metavar="TOKENS", help=text)
    p.add_argument("--limit", type=whole_number, default=COUNT, metavar="N", help="number of problems, from the first")
    add_tokens(p, "768", "per answer, at most")
    add_text(p)
    add_out(p, "report.html, humaneval.json and humaneval.csv, with answers")
    add_cache(p)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    from vllm_kvq.eval.engine.engines import EngineFailed

    p = parser()
    args = p.parse_args(arguments)
    if args.limit > COUNT:
        p.error(f"--limit {args.limit} is more than the {COUNT} problems that there are")
    check_model(p, args.model)
    chosen = (REFERENCE, *(c for c in args.formats if c != REFERENCE))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        model = Model.of(args.model, args.dtype)
        benchmark = Benchmark(model, chosen, problems(), args.limit, args.context, args.tokens, args.seed)
        store = Store(args.cache)
        if any(choice.ours for choice in chosen):
            compile_kernels()
        found = measured(benchmark, store)
    except (ValueError, OSError, RuntimeError) as error:
        return console.fail(PROG, error, args.json)
    except EngineFailed as error:
        return console.fail(PROG, f"vLLM can't serve {args.model} here: {error}", args.json)
    document = as_document(benchmark, found)
    if args.out:
        write(args.out, document)
        page(benchmark, found, command(PROG, arguments)).write(args.out)
    if args.json:
        console.show_json(document)
    else:
        show(benchmark, found)
    return console.DONE if any(s.answers for s in found if s.choice != REFERENCE or len(chosen) == 1) else console.FOUND


@dataclass(frozen=True)
class Paired:
    """The number of problems with each pair of verdicts."""

    both: int
    lost: int
    """Problems solved only with bf16."""
    won: int
    """Problems solved only with the format."""
    neither: int
    p: float
    """McNemar's exact test."""

    @classmethod
    def of(cls, plain: Sequence[bool], ours: Sequence[bool]) -> Paired:
        pairs = [*zip(plain, ours, strict=True)]
        both, lost, won, neither = map(pairs.count, ((True, True), (True, False), (False, True), (False, False)))
        return cls(both, lost, won, neither, mcnemar(ours, plain))


@dataclass(frozen=True)
class Score:
    choice: Choice
    bits: float | None
    answers: tuple[Answer, ...]
    paired: Paired | None
    """The agreement with bf16."""
    same: int
    """The number of answers identical to bf16's."""
    problem: str | None
    """Why there are no answers."""

    @property
    def solved(self) -> int:
        return sum(answer.passed for answer in self.answers)


def measured(benchmark: Benchmark, store: Store) -> list[Score]:
    with Bar(len(benchmark.choices) * benchmark.limit) as progress:
        run = Run(benchmark, store, progress)
        run.go()
        found: list[Score] = []
        for choice in benchmark.choices:
            progress(f"{choice.label}: testing the answers", 0)
            answers = run.answers(choice) or ()
            plain = found[0].answers if found else answers
            paired = Paired.of([a.passed for a in plain], [a.passed for a in answers]) if answers else None
            same = sum(a.text == b.text for a, b in zip(answers, plain, strict=False))
            problem = None if answers else run.problems.get(choice.label, "there are no answers")
            found.append(Score(choice, run.bits(choice), answers, paired, same, problem))
    return found


def table(benchmark: Benchmark, found: Sequence[Score]) -> console.Table:
    rows = []
    for score in found:
        bits = "-" if score.bits is None else f"{score.bits:.2f}"
        if score.paired is None:
            rows.append([score.choice.label, bits, *["-"] * 7])
            continue
        plain = score.choice == REFERENCE
        cut = str(sum(answer.cut for answer in score.answers))
        share = f"{100 * score.solved / len(score.answers):.1f}"
        against = ["-"] * 4 if plain else [
            str(score.paired.lost), str(score.paired.won), f"{score.paired.p:.2g}", str(score.same)
        ]  # fmt: skip
        label = "bf16" if plain and benchmark.model.dtype == "bfloat16" else score.choice.label
        rows.append([label, bits, f"{score.solved}/{len(score.answers)}", share, *against, cut])
    context = f", after {benchmark.behind} tokens of solved problems" if benchmark.behind else ""
    title = f"HumanEval, {benchmark.limit} of {COUNT} problems, greedy{context}: {benchmark.model.name}"
    head = ["format", "bits", "solved", "pass@1, %", "lost", "won", "p", "same", "cut"]
    return console.Table(head, rows, title=title)


def notes(benchmark: Benchmark, found: Sequence[Score]) -> list[str]:
    lines = [*NOTE.splitlines(), f"bits: per cached number at {benchmark.usual} tokens, everything counted"]
    return lines + [f"{score.choice.label}: {score.problem}" for score in found if score.problem]


def show(benchmark: Benchmark, found: Sequence[Score]) -> None:
    table(benchmark, found).show()
    print("", *notes(benchmark, found), sep="\n")


def answer_table(score: Score) -> console.Table:
    """Without the answers themselves, which are in the other files."""
    rows = [[str(getattr(answer, name)) for name in SHOWN] for answer in score.answers]
    return console.Table(SHOWN, rows, 3, f"{score.choice.label}, {len(rows)} problems")


def page(benchmark: Benchmark, found: Sequence[Score], line: str) -> Page:
    model = benchmark.model.name
    answers = [answer_table(score) for score in found if score.answers]
    sections = (
        Section("Tables", [table(benchmark, found)]),
        Section("Problem by problem", answers),
        Section("Notes", notes(benchmark, found)),
    )
    return Page(f"{PROG}: {model}", ABOUT, line, [("model", model)], sections)


def as_document(benchmark: Benchmark, found: Sequence[Score]) -> dict[str, Any]:
    return {
        "model": benchmark.model.name,
        "problems": benchmark.limit,
        "context": benchmark.behind,
        "tokens": benchmark.longest,
        "seed": benchmark.seed,
        "formats": [
            {
                "format": score.choice.format,
                "options": dict(score.choice.options),
                "label": score.choice.label,
                "bits": score.bits,
                "bits_at": benchmark.usual,
                "solved": score.solved if score.answers else None,
                "paired": None if score.paired is None else asdict(score.paired),
                "same": score.same,
                "problem": score.problem,
                "answers": [asdict(answer) for answer in score.answers],
            }
            for score in found
        ],
    }


def write(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "humaneval.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with (folder / "humaneval.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in document["formats"]:
            writer.writerows({"format": row["label"], **answer} for answer in row["answers"])

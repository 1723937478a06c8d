"""`vllm-kvq eval heads MODEL`: which layers and KV heads a format hurts most, measured on one text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.cli.arguments import ALL, add_context, add_formats, add_out, formats
from vllm_kvq.cli.eval.arguments import NO_REFERENCE, WrongUsage, add_model, add_text, check_model, too_short
from vllm_kvq.cli.page.document import Page, Section
from vllm_kvq.cli.page.made import command
from vllm_kvq.cli.page.plots import IF_INSTALLED, NO_PLOT, Drawn, pictures
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import calibration_texts, of_texts
from vllm_kvq.eval.heads.capture import Captured, capture
from vllm_kvq.eval.heads.heads import READERS, HeadError, head_errors
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.results import plots
from vllm_kvq.eval.tasks.samples import sequence
from vllm_kvq.integration.preview.apart import Failed
from vllm_kvq.integration.preview.constants import Known

PROG = "vllm-kvq eval heads"

MEASURES = {
    "score": "relative error of the scores q . K",
    "value": "relative error of the values",
    "output": "relative error of attention's output",
}
Errors = Mapping[str, Sequence[HeadError]]
"""Errors by the format as users write it."""
PLOT = "heads.png"
ABOUT = "Errors of single KV heads on one text: what a format would have stored of it, next to what was computed."


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Errors of single KV heads on one text: queries, keys and values are captured from vLLM with a 16-bit cache, "
        f"and\nthe queries of the last {READERS} tokens read what a format would have stored of the earlier tokens.\n"
        "Takes minutes with many formats or a large model.",
        ("MODEL --formats kitty2,kitty2:S=0", "MODEL --context 2048 --out results --measure output"),
        "nothing could be measured",
    )
    add_model(p)
    add_formats(p, ALL, NO_REFERENCE)
    p.add_argument("--measure", choices=MEASURES, default="score", help="error that ranks heads and is plotted")
    add_context(p, "1024", "of the text")
    add_text(p)
    add_out(p, f"report.html, and {PLOT}, a heat map of layers by KV heads, {IF_INSTALLED}")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    chosen = args.formats
    if problem := too_short(chosen, args.context, READERS, list(chosen) == formats()(ALL)):
        p.error(problem)
    check_model(p, args.model)
    try:
        model = Model.of(args.model, args.dtype)
        captured = captured_text(model, args.context, args.seed, any(map(of_texts, chosen)))
        errors, problems = measured(captured, chosen)
        drawn = drawn_to(args.out, errors, args.measure) if args.out else None
    except WrongUsage as error:
        p.error(str(error))
    except (ValueError, OSError, Failed) as error:
        return console.fail(PROG, error, args.json)
    notes = list(problem_lines(problems))
    if captured.windows:
        layers = ", ".join(map(str, captured.windows))
        notes.insert(0, f"layers with a sliding window, which are not packed: {layers}")
    if args.out:
        facts = [("model", args.model), ("text", f"{args.context} tokens")]
        sections = (
            Section("Heat map", [NO_PLOT] if drawn is None else drawn),
            Section("Tables", [table(errors, args.measure)]),
            Section("Notes", notes),
        )
        Page(f"{PROG}: {args.model}", ABOUT, command(PROG, arguments), facts, sections).write(args.out)
    if args.json:
        found = {label: [asdict(e) for e in heads] for label, heads in errors.items()}
        what = {"model": args.model, "context": args.context, "windows": captured.windows}
        console.show_json({**what, "errors": found, "problems": problems})
        return console.DONE
    table(errors, args.measure).show()
    if captured.windows:
        print(notes[0])
    for line in problem_lines(problems):
        print(line, file=sys.stderr)
    for picture in drawn or ():
        print(picture.path)
    return console.DONE


def drawn_to(folder: Path, errors: Errors, measure: str) -> Drawn:
    return pictures(lambda: [plots.heat_map(folder / PLOT, errors, measure, MEASURES[measure])])


def problem_lines(problems: Mapping[str, str]) -> Iterator[str]:
    return (f"{label}: {problem}" for label, problem in problems.items())


def measured(captured: Captured, chosen: Sequence[Choice]) -> tuple[dict[str, list[HeadError]], dict[str, str]]:
    """Each choice's errors; and a sentence for each one that can't be measured on this model.

    ValueError if the user has named such a format, or if nothing can be measured.
    """
    by_name = list(chosen) != formats()(ALL)
    errors, problems = {}, {}
    for choice in chosen:
        try:
            errors[choice.label] = head_errors(captured, choice.format, choice.options)
        except ValueError as error:
            if by_name:
                raise
            problems[choice.label] = str(error)
    if not errors:
        raise ValueError(next(iter(problems.values())))
    return errors, problems


def captured_text(model: Model, tokens: int, seed: int, calibration: bool = False) -> Captured:
    """The queries, keys and values of a text, and with `calibration` those of the texts for calibration.

    Raises ValueError or Failed, with a sentence.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not READERS < tokens < model.longest:
        raise WrongUsage(f"a text of {tokens} tokens is not between {READERS + 1} and {model.longest - 1}")
    text = sequence(model.tokenizer, "text", tokens, tokens, 0, seed)
    captured = capture(str(model.folder), [text.tokens], model.dtype)
    captured = replace(captured, of_server=Known(str(model.folder), model.dtype).constants)
    if not calibration:
        return captured
    others = calibration_texts(model.tokenizer, model.longest)
    return replace(captured, calibration=capture(str(model.folder), others, model.dtype))


def table(errors: Errors, measure: str) -> console.Table:
    """A line for each format: the mean over heads of each error, and the worst head by `measure`."""
    rows = []
    for label, heads in errors.items():
        means = [sum(getattr(e, name) for e in heads) / len(heads) for name in MEASURES]
        worst = max(heads, key=lambda e: getattr(e, measure))
        place = f"layer {worst.layer}, head {worst.head}: {getattr(worst, measure):.3f}"
        rows.append([label, *(f"{mean:.3f}" for mean in means), place])
    return console.Table(["format", *MEASURES, f"worst {measure}"], rows, title="relative errors, mean over KV heads")

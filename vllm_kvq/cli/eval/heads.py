"""`vllm-kvq eval heads MODEL`: which layers and KV heads a format hurts most, measured on one text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from vllm_kvq import console
from vllm_kvq.cli.eval.arguments import add_formats, add_model, add_text
from vllm_kvq.eval.choice import Choice, choices
from vllm_kvq.eval.constants import calibrated, calibration_tokens
from vllm_kvq.eval.heads.capture import Captured, CaptureFailed, capture
from vllm_kvq.eval.heads.heads import READERS, HeadError, head_errors
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.results import plots
from vllm_kvq.eval.tasks.samples import sequence

MEASURES = {
    "score": "relative error of the scores q . K",
    "value": "relative error of the values",
    "output": "relative error of attention's output",
}
Errors = Mapping[str, Sequence[HeadError]]
"""Colours by the format as users write it."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq eval heads",
        "Errors of single KV heads on one text: queries, keys and values are captured from vLLM with a 16-bit cache, "
        f"and\nthe queries of the last {READERS} tokens read what a format would have stored of the earlier tokens.",
        ("MODEL --formats squat2,squat2:r=8", "MODEL --tokens 2048 --plot heads.png --measure output"),
        "nothing could be measured",
    )
    add_model(p)
    add_formats(p, "public")
    p.add_argument(
        "--measure", choices=MEASURES, default="score", help="error that ranks heads and is plotted (%(default)s)"
    )
    p.add_argument(
        "--plot", type=Path, metavar="PNG", help="file for a heat map, layers by KV heads (needs matplotlib)"
    )
    p.add_argument("--tokens", type=int, default=1024, help="of the text (%(default)s)")
    add_text(p)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    try:
        chosen = ours(choices(args.formats))
    except ValueError as error:
        p.error(str(error))
    try:
        captured = captured_text(Model.of(args.model, args.dtype), args.tokens, args.seed, any(map(calibrated, chosen)))
        errors, problems = measured(captured, chosen, args.formats == p.get_default("formats"))
        if args.plot:
            plots.heat_map(args.plot, errors, args.measure, MEASURES[args.measure])
    except (ValueError, OSError, CaptureFailed) as error:
        print(f"vllm-kvq eval heads: {error}", file=sys.stderr)
        return console.FOUND
    if args.json:
        found = {label: [asdict(e) for e in heads] for label, heads in errors.items()}
        what = {"model": args.model, "tokens": args.tokens, "windows": captured.windows}
        console.show_json({**what, "errors": found, "problems": problems})
        return console.DONE
    table(errors, args.measure).show()
    if captured.windows:
        print(f"layers with a sliding window, which are not packed: {', '.join(map(str, captured.windows))}")
    for label, problem in problems.items():
        print(f"{label}: {problem}", file=sys.stderr)
    if args.plot:
        print(args.plot)
    return console.DONE


def ours(chosen: Sequence[Choice]) -> list[Choice]:
    for choice in chosen:
        if not choice.ours:
            raise ValueError(f"{choice.format} is vLLM's own cache, which has no reference implementation here")
    return list(chosen)


def measured(
    captured: Captured, chosen: Sequence[Choice], by_default: bool
) -> tuple[dict[str, list[HeadError]], dict[str, str]]:
    """Each choice's errors; and a sentence for each one that can't be measured on this model.

    ValueError if the user has named such a format, or if nothing can be measured.
    """
    errors, problems = {}, {}
    for choice in chosen:
        try:
            errors[choice.label] = head_errors(captured, choice.format, choice.options)
        except ValueError as error:
            if not by_default:
                raise
            problems[choice.label] = str(error)
    if not errors:
        raise ValueError(next(iter(problems.values())))
    return errors, problems


def captured_text(model: Model, tokens: int, seed: int, calibration: bool = False) -> Captured:
    """The queries, keys and values of two texts. Raises ValueError or CaptureFailed, with a sentence."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not READERS < tokens < model.longest:
        raise ValueError(f"a text of {tokens} tokens is not between {READERS + 1} and {model.longest - 1}")
    text = sequence(model.tokenizer, "text", tokens, tokens, 0, seed)
    captured = capture(str(model.folder), text.tokens, model.dtype)
    if not calibration:
        return captured
    other = calibration_tokens(model.tokenizer, model.longest)
    return replace(captured, calibration=capture(str(model.folder), other, model.dtype))


def table(errors: Errors, measure: str) -> console.Table:
    """A line for each format: the mean over heads of each error, and the worst head by `measure`."""
    rows = []
    for label, heads in errors.items():
        means = [sum(getattr(e, name) for e in heads) / len(heads) for name in MEASURES]
        worst = max(heads, key=lambda e: getattr(e, measure))
        place = f"layer {worst.layer}, head {worst.head}: {getattr(worst, measure):.3f}"
        rows.append([label, *(f"{mean:.3f}" for mean in means), place])
    return console.Table(["format", *MEASURES, f"worst {measure}"], rows, title="relative errors, mean over KV heads")

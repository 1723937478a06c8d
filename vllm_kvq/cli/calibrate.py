"""`vllm-kvq calibrate MODEL`: the format and options that harm this model's attention least within a limit of bits.
With `--text`: constants of calibrated formats (constants.py)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from vllm_kvq import console
from vllm_kvq.cli import constants
from vllm_kvq.cli.arguments import ALL, add_context, add_formats, add_out, formats
from vllm_kvq.cli.eval.arguments import NO_REFERENCE, WrongUsage, add_model, add_text, check_model, too_short
from vllm_kvq.cli.eval.heads import captured_text, measured
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import of_texts
from vllm_kvq.eval.heads.assign import Candidate, best, by_layer, servable
from vllm_kvq.eval.heads.heads import READERS
from vllm_kvq.eval.model import Model
from vllm_kvq.integration.preview.apart import Failed

PROG = "vllm-kvq calibrate"

YAML = "kvq.yaml"


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "The least lossy format and options within a bit budget, as YAML for `vllm serve MODEL --config`.\n"
        "They are compared by the relative error of attention's output on one text, which says little about answers:\n"
        "see `vllm-kvq eval`. One format serves all layers; if bits are left, its worst layers are not packed.\n"
        "Takes minutes: the model runs once, and each format is measured.\n"
        "With --text nothing is chosen: the constants of calibrated formats are fitted to your text instead of the\n"
        "bundled one, and written where servers look. It is not valid with --bits, --context or --seed.",
        (
            "MODEL --bits 4",
            "MODEL --bits 3.5 --formats kitty2,kitty2:S=8 --out configs",
            "MODEL --text chats.txt --text code.py",
        ),
        "nothing could be measured or written, or nothing is small enough",
    )
    add_model(p)
    p.add_argument(
        "--bits",
        type=_bits,
        default=3.5,
        metavar="BITS",
        help="maximum bits per element, including window, sinks, sidecar and layers not packed",
    )
    add_context(p, "2048", "of the text; bits are counted at this length")
    add_formats(p, ALL, NO_REFERENCE)
    add_text(p)
    p.add_argument(
        "--text",
        action="append",
        type=constants.text_file,
        metavar="FILE",
        help="UTF-8 text to fit the constants of --formats to; no format is chosen (default: none; with --text, "
        "--formats defaults to all that have constants)",
    )
    add_out(p, f"{YAML}, or {constants.FILE} (default: standard output, or where servers look)")
    console.add_json(p)
    return p


def _bits(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 16:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 16 bits")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if args.text:
        if problem := constants.wrong_usage(args, sys.argv[1:] if arguments is None else arguments):
            p.error(problem)
        return constants.main(PROG, args)
    chosen = args.formats
    if problem := too_short(chosen, args.context, READERS, list(chosen) == formats()(ALL)):
        p.error(problem)
    if any("skip_layers" in choice.options for choice in chosen):
        p.error("--formats: calibrate itself chooses the layers not to pack; leave skip_layers out")
    check_model(p, args.model)
    try:
        model = Model.of(args.model, args.dtype)
        bits = _Bits(model, args.context)
        captured = captured_text(model, args.context, args.seed, any(map(of_texts, chosen)))
        errors, problems = measured(captured, chosen)
        bits.problems |= problems
        tried = [choice for choice in chosen if choice.label in errors]
        found = list(servable({label: by_layer(e) for label, e in errors.items()}, tried, bits, args.bits))
        kept = best(found, args.bits)
        if kept is None:
            raise ValueError(_nothing(found, bits, args))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / YAML).write_text(yaml(args, kept), encoding="utf-8")
    except WrongUsage as error:
        p.error(str(error))
    except (ValueError, OSError, Failed) as error:
        return console.fail(PROG, error, args.json)
    if args.json:
        everything = [c.document() for c in found]
        console.show_json({"model": args.model, "best": kept.document(), "candidates": everything} | bits.document())
        return console.DONE
    print(table(found, args).plain(), file=sys.stderr)
    for label, problem in bits.problems.items():
        print(f"{label}: {problem}", file=sys.stderr)
    if not args.out:
        print(yaml(args, kept), end="")
    return console.DONE


class _Bits:
    """The bits per element that a server would take with each choice, from vLLM's own configuration."""

    def __init__(self, model: Model, context: int) -> None:
        self.model, self.context = model, context
        self.problems: dict[str, str] = {}
        """Why a server would not start, by the choice's label."""

    def __call__(self, choice: Choice) -> float | None:
        from vllm_kvq.eval.bits import served_bits
        from vllm_kvq.integration.preview.dry_start import WouldNotStart

        try:
            return served_bits(str(self.model.folder), choice, self.model.dtype, self.context)
        except WouldNotStart as error:
            self.problems[choice.label] = str(error)
            return None

    def document(self) -> dict[str, object]:
        return {"context": self.context, "problems": self.problems}


def _nothing(found: Sequence[Candidate], bits: _Bits, args: argparse.Namespace) -> str:
    if not found:
        return next(iter(bits.problems.values()))
    least = min(found, key=lambda c: c.bits)
    return (
        f"nothing takes {args.bits:g} bits or fewer at {args.context} tokens; {least.assignment.choice.label} takes "
        f"{least.bits:.2f}"
    )


def table(found: Sequence[Candidate], args: argparse.Namespace) -> console.Table:
    rows = [
        [c.assignment.choice.label, f"{c.bits:.2f}", f"{c.error:.3f}", "" if c.bits <= args.bits else "too large"]
        for c in sorted(found, key=lambda c: c.bits)
    ]
    title = f"bits per element and relative error of attention's output, at {args.context} tokens"
    return console.Table(["format", "bits", "error", ""], rows, title=title)


def yaml(args: argparse.Namespace, kept: Candidate) -> str:
    choice = kept.assignment.choice
    lines = [
        f"# vllm serve {args.model} --config THIS_FILE",
        f"# At {args.context} tokens: {kept.bits:.2f} bits per element, everything counted, and a relative error of",
        f"# attention's output of {kept.error:.3f}.",
        f"kv-cache-dtype: {choice.format}",
    ]
    if choice.options:
        lines += ["additional-config:", "  kvq:"]
        lines += [f"    {name}: {json.dumps(value)}" for name, value in choice.options.items()]
    return "\n".join(lines) + "\n"

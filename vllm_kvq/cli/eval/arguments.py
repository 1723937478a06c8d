"""Arguments that the evaluating commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_kvq.cli.arguments import from_zero, words
from vllm_kvq.eval.choice import FP8, Choice
from vllm_kvq.eval.model import DEMO
from vllm_kvq.eval.run.store import default_folder
from vllm_kvq.eval.tasks.tasks import NAMES
from vllm_kvq.formats.by_layer import all_options
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.table import get_format, suite
from vllm_kvq.integration.preview.hub import model_problem

NO_REFERENCE = "has no reference implementation here"
DTYPES = ("float32", "bfloat16", "float16")


def usual_formats() -> str:
    """Those that are measured by default, as --formats takes them: the usual ones, and vLLM's own 8 bits."""
    return ",".join((*suite("usual"), FP8))


def add_model(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help="checkpoint folder, model name, or `demo` for the repository's model")


class WrongUsage(ValueError):
    """A sentence about an argument, known only once the model's description is read."""


def check_model(p: argparse.ArgumentParser, name: str) -> None:
    """Refuses a wrong model before anything is loaded."""
    if name != DEMO and (problem := model_problem(name)):
        p.error(str(problem))


def too_short(chosen: Sequence[Choice], tokens: int, readers: int = 0, any_of_them: bool = False) -> str | None:
    """Why one of the formats, or each of them if `any_of_them` will do, would pack nothing of such a text: as far as is
    known without a model, whose pages may take more. `readers`: the number of last tokens, which only read."""
    least = {}
    for choice in chosen:
        if choice.ours:
            of = [get_format(choice.format).settings(options) for options in all_options(choice.options)]
            newest = min(s.W if s.W_keys is None else min(s.W, s.W_keys) for s in of)
            least[choice.label] = newest + (min(s.S for s in of) // SLAB + 1) * SLAB + max(readers, 1)
    if not least:
        return None
    label, needed = (min if any_of_them else max)(least.items(), key=lambda item: item[1])
    if tokens >= needed:
        return None
    last = f" and the last {readers} read the others" if readers else ""
    return (
        f"--context {tokens}: {label} packs nothing of so short a text, because the newest and the first tokens are in "
        f"full precision{last}; it takes at least {needed}"
    )


def add_text(p: argparse.ArgumentParser) -> None:
    """What the commands that give a model texts have in common."""
    p.add_argument("--dtype", choices=DTYPES, help="dtype of the model (default: the checkpoint's)")
    p.add_argument("--seed", type=from_zero, default=0, metavar="SEED", help="seed of the choice of texts")


def add_tasks(p: argparse.ArgumentParser, default: str | None, note: str = "") -> None:
    p.add_argument("--tasks", type=words(NAMES), default=default, metavar="TASK,...", help=", ".join(NAMES) + note)


def add_cache(p: argparse.ArgumentParser) -> None:
    text = "folder where measurements are saved for later runs"
    p.add_argument("--cache", type=Path, default=default_folder(), metavar="DIR", help=text)


def add_baseline(p: argparse.ArgumentParser, default: str) -> None:
    text = f"format with which the others are compared, text by text (default: {default})"
    p.add_argument("--baseline", metavar="FORMAT", help=text)

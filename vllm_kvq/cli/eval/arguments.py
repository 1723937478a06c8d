"""Arguments that the evaluating commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_kvq.cli.arguments import from_zero, words
from vllm_kvq.eval.run.store import default_folder
from vllm_kvq.eval.tasks.tasks import NAMES
from vllm_kvq.formats.table import suite

NO_REFERENCE = "has no reference implementation here"
DTYPES = ("float32", "bfloat16", "float16")


def usual_formats() -> str:
    """Those that are measured by default, as --formats takes them."""
    return ",".join(suite("usual"))


def add_model(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help="checkpoint folder, model name, or `demo` for the repository's model")


def add_text(p: argparse.ArgumentParser) -> None:
    """What the commands that give a model texts have in common."""
    p.add_argument("--dtype", choices=DTYPES, help="dtype of the model (default: the checkpoint's)")
    p.add_argument("--seed", type=from_zero, default=0, metavar="SEED", help="seed of the choice of texts")


def add_tasks(p: argparse.ArgumentParser, default: str | None, note: str = "") -> None:
    p.add_argument("--tasks", type=words(NAMES), default=default, metavar="TASK,...", help=", ".join(NAMES) + note)


def add_cache(p: argparse.ArgumentParser) -> None:
    text = "folder that keeps what was measured for later runs"
    p.add_argument("--cache", type=Path, default=default_folder(), metavar="DIR", help=text)


def add_baseline(p: argparse.ArgumentParser, default: str) -> None:
    text = f"format with which the others are compared, text by text (default: {default})"
    p.add_argument("--baseline", metavar="FORMAT", help=text)

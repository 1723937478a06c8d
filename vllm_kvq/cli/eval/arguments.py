"""Arguments that the evaluating commands share."""

from __future__ import annotations

import argparse

from vllm_kvq.formats.table import suite


def add_model(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help="checkpoint folder, model name, or `demo` for the repository's model")


def add_formats(p: argparse.ArgumentParser, which: str) -> None:
    """`--formats`, by default the formats of a suite of the table."""
    names = ",".join(suite(which))
    p.add_argument(
        "--formats", default=names, metavar="F,...", help="formats, with options: squat2:r=8,W=64 (%(default)s)"
    )


def add_text(p: argparse.ArgumentParser) -> None:
    """What the commands that measure one text have in common."""
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="model dtype (the checkpoint's)")
    p.add_argument("--seed", type=int, default=0, help="of the text (%(default)s)")

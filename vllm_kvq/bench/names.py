"""`--formats` of the bench commands."""

from __future__ import annotations

import argparse

from vllm_kvq.formats.table import get_format, suite

ALL = "all"


def add_formats(p: argparse.ArgumentParser) -> None:
    recommended = suite("usual")[0]
    text = f"names of formats, or {ALL} ({recommended})"
    p.add_argument("--formats", metavar="F,...", type=_names, default=[recommended], help=text)


def _names(text: str) -> list[str]:
    if text == ALL:
        return [*suite("public")]
    found = [*dict.fromkeys(text.split(","))]
    for name in found:
        try:
            get_format(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return found

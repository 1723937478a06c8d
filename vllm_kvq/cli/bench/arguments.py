"""Arguments that the bench commands share."""

from __future__ import annotations

import argparse

from vllm_kvq.formats.table import get_format, suite

ALL = "all"


def add_formats(p: argparse.ArgumentParser) -> None:
    recommended = suite("usual")[0]
    text = f"names of formats, or {ALL} ({recommended})"
    p.add_argument("--formats", metavar="F,...", type=_names, default=[recommended], help=text)


def add_gpu_formats(p: argparse.ArgumentParser) -> None:
    """Formats with GPU kernels."""
    text = f"names of formats with GPU kernels, as in squat2,polar4, or {ALL} ({ALL})"
    p.add_argument("--formats", metavar="F,...", type=_gpu_names, default=ALL, help=text)


def _names(text: str) -> list[str]:
    return [*suite("public")] if text == ALL else _known(text)


def _gpu_names(text: str) -> list[str]:
    from vllm_kvq.bench.gpu.decode import formats

    served = [*formats()]
    found = served if text == ALL else _known(text)
    for name in found:
        if name not in served:
            raise argparse.ArgumentTypeError(f"{name} has no GPU kernels; these have: {', '.join(served)}")
    return found


def _known(text: str) -> list[str]:
    found = [*dict.fromkeys(text.split(","))]
    for name in found:
        try:
            get_format(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return found

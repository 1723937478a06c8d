"""A Python command that runs in this same process, because the process has been prepared for it."""

from __future__ import annotations

import os
import runpy
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """With `-m MODULE [ARGUMENT ...]` last, as in Python itself: `command` is the module and its arguments."""
    parser.add_argument("-m", dest="command", nargs=REMAINDER, required=True, help="a module and its arguments")
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("-m needs a module")
    return options


def run(command: list[str], pytest_option: str) -> int:
    """`pytest_option` is added in case the module is pytest."""
    os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} {pytest_option}"
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    return 0

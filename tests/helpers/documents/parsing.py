"""Command lines, as far as the programs' own parsers read them: nothing of what they ask for is done."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pages import ROOT
from serve_arguments import parse_serve


class Read(Exception):
    """A parser has read its arguments."""

    def __init__(self, rest: Sequence[str]) -> None:
        super().__init__(rest)
        self.rest = list(rest)


@contextmanager
def only_parsers() -> Iterator[None]:
    """Whoever parses arguments gets no further: `Read`, or SystemExit for wrong usage."""
    whole = argparse.ArgumentParser.parse_known_args

    def read(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        raise Read(whole(parser, *arguments, **named)[1])

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", read):
        yield


def problem(words: Sequence[str]) -> str | None:
    """What the program's parser says against it. None: nothing, or a program that is neither ours nor vLLM's."""
    from proof.__main__ import main as proof
    from vllm_kvq.cli import main as cli

    match list(words):
        case ["vllm-kvq", "check", model, *rest]:  # it hands everything else on to vLLM's parser
            return refused(lambda: parse_serve(["vllm", "serve", model, *without(rest, "--json", "--verbose")]))
        case ["vllm-kvq", *rest] | ["python", "-m", "vllm_kvq", *rest]:
            return refused(lambda: cli(rest), "plan" in rest[:1])
        case ["python", "-m", "proof"]:
            return None  # it lists its commands
        case ["python", "-m", "proof", *rest]:
            return refused(lambda: proof(rest))
        case ["vllm", "serve", *_]:
            return refused(lambda: parse_serve(list(words)))
        case ["vllm", "run-batch", *rest]:
            return refused(lambda: run_batch(rest))
        case ["python", script, *rest] if (ROOT / script).is_file():
            return refused(lambda: run_script(script, rest)) if "argparse" in (ROOT / script).read_text() else None
        case ["python", script, *_] if "/" in script and script.endswith(".py"):
            return f"there is no {script}"
        case ["bash", script, *_] if not (ROOT / script).is_file():
            return f"there is no {script}"
        case ["make", *targets]:
            return no_target(targets)
    return None


def without(words: Sequence[str], *flags: str) -> list[str]:
    return [word for word in words if word not in flags]


def refused(run: Callable[[], Any], vllms_too: bool = False) -> str | None:
    """`vllms_too`: what its parser leaves is for vLLM's."""
    said, answer = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(answer),
            contextlib.chdir(ROOT),
            only_parsers(),
        ):
            run()
    except Read as read:
        rest = read.rest
        if rest and vllms_too:
            return refused(lambda: parse_serve(["vllm", "serve", "MODEL", *rest]))
        return f"unknown: {' '.join(rest)}" if rest else None
    except SystemExit as stopped:
        return None if stopped.code == 0 else said.getvalue().strip().splitlines()[-1]
    return None if not said.getvalue() else said.getvalue().strip()


def run_batch(words: Sequence[str]) -> None:
    from vllm.entrypoints.launchers.run_batch import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def run_script(script: str, words: Sequence[str]) -> None:
    with mock.patch.object(sys, "argv", [script, *words]), mock.patch.dict(os.environ):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def no_target(words: Sequence[str]) -> str | None:
    """A target or a variable that the Makefile does not have."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for rule in re.findall(r"^([a-z ]+):", text, re.M) for name in rule.split()}
    variables = set(re.findall(r"^([A-Z_]+) \?=", text, re.M))
    missing = [word for word in words if word.partition("=")[0] not in (variables if "=" in word else targets)]
    return f"the Makefile has no {missing[0]}" if missing else None

"""The command `vllm-kvq`, also `python -m vllm_kvq`: the list of its commands, each in its own module.

A module has `parser()` and `main(arguments)`, and is imported only when its command is run. What the modules share,
such as exit codes, is in console.py.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_kvq import __version__, console
from vllm_kvq.cli.late import load_torch_late
from vllm_kvq.kernels.variables import variables_problem
from vllm_kvq.meant import SURE, meant

PROG = "vllm-kvq"
FLAGS = ("--version", "--help")
"""What is taken without a command."""
VERSION = f"\n       {PROG} help [COMMAND]\n       {PROG} --version"


@dataclass(frozen=True)
class Group:
    """Commands that start with these words, which by themselves are not a command."""

    words: tuple[str, ...]
    about: str
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    about: str
    module: str
    refuses: bool = False
    """Whether it refuses an environment that others only warn of."""


GROUPS = (
    Group((), "Low-bit KV cache formats for vLLM.", ("formats", "check MODEL", "doctor")),
    Group(
        ("bench",), "Speed against vLLM's own cache, measured here.", ("bench attention --formats all", "bench slow")
    ),
)
COMMANDS = (
    Command(("formats",), "exact bits and capacity of every format, and their options", "vllm_kvq.cli.formats"),
    Command(
        ("check",),
        "what each format would gain and lose with MODEL here",
        "vllm_kvq.cli.check.one",
        refuses=True,
    ),
    Command(("plan",), "what each format would hold on another machine", "vllm_kvq.cli.plan", refuses=True),
    Command(("conformance",), "whether a format does what every format must, in seconds", "vllm_kvq.cli.conformance"),
    Command(("doctor",), "whether this machine can serve", "vllm_kvq.cli.doctor"),
    Command(("bench", "attention"), "one layer's attention in a decode step", "vllm_kvq.cli.bench.attention"),
    Command(("bench", "slow"), "the same for head sizes and options that are slow", "vllm_kvq.cli.bench.slow"),
    Command(("bench", "prefill"), "packing cost of a prompt, in addition to attention", "vllm_kvq.cli.bench.prefill"),
    Command(("bench", "decode"), "tokens per second of two engines side by side", "vllm_kvq.cli.bench.decode"),
    Command(("bench", "serve"), "two servers side by side, over HTTP", "vllm_kvq.cli.bench.serve"),
    Command(("bench", "capacity"), "servers with equal bytes of cache under a load", "vllm_kvq.cli.bench.capacity"),
    Command(("bench", "gpu"), "decode steps on a GPU, without vLLM", "vllm_kvq.cli.bench.gpu"),
    Command(("bench", "plot"), "a plot of what `bench gpu` has measured", "vllm_kvq.cli.bench.plot"),
    # a command's own arguments may follow its name, so longer names come first
    Command(("eval", "error"), "errors of q . K on synthetic data", "vllm_kvq.cli.eval.error"),
    Command(("calibrate",), "the best format and options for a model within given bits", "vllm_kvq.cli.calibrate"),
    Command(("eval", "heads"), "errors of single KV heads, as a table and a heat map", "vllm_kvq.cli.eval.heads"),
    Command(
        ("eval", "answers"), "each format's continuations of the same prompts, as text", "vllm_kvq.cli.eval.answers"
    ),
    Command(
        ("eval", "humaneval"),
        "problems of HumanEval that a model solves with each format",
        "vllm_kvq.cli.eval.humaneval",
    ),
    Command(("eval", "show"), "show saved evaluation results, worst tokens and plots", "vllm_kvq.cli.eval.show"),
    Command(("eval",), "whether a model still answers correctly with each format", "vllm_kvq.cli.eval.model"),
)


def _meant_below(command: Command, rest: Sequence[str]) -> Command | None:
    """The longer command for which a model's name looks like a typo: `eval eror` evaluates no model."""
    at = len(command.words)
    below = {c.words[at]: c for c in COMMANDS if c.words[:at] == command.words and len(c.words) > at}
    close = meant(rest[0], below, SURE) if rest and not Path(rest[0]).exists() else None
    return None if close is None else below[close]


def group_help(group: Group) -> str:
    name = " ".join((PROG, *group.words))
    below = [c for c in COMMANDS if c.words[: len(group.words)] == group.words]
    names = [" ".join(c.words[len(group.words) :]) for c in below]
    width = max(map(len, names)) + 2
    commands = "\n".join(f"  {n:{width}}{c.about}" for n, c in zip(names, below, strict=True))
    end = console.help_end([f"{PROG} {e}" for e in group.examples], "a problem was found, or the command failed")
    return (
        f"usage: {name} COMMAND ...{VERSION if not group.words else ''}\n\n{group.about}\n\ncommands:\n{commands}\n\n"
        f"Each has --help, with its own examples.\n\n{end}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _unread():
            raise
        return console.DONE


def _unread() -> bool:
    """Whether nobody reads standard output any more, as behind `| head` once it has seen enough."""
    asked = select.poll()
    asked.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in asked.poll(0)):
        return False
    # Python itself flushes once more as it exits
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def run(argv: Sequence[str] | None = None) -> int:
    # vLLM's log would otherwise be mixed with the output on standard output
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    load_torch_late()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        print(f"{PROG} {__version__}")
        return console.DONE
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    command = next((c for c in COMMANDS if tuple(arguments[: len(c.words)]) == c.words), None)
    if (command is None or not command.refuses) and (problem := variables_problem(os.environ)):
        print(f"{PROG}: warning: {problem}", file=sys.stderr)
    if command is not None:
        rest = arguments[len(command.words) :]
        if (below := _meant_below(command, rest)) is not None:
            name = " ".join((PROG, *command.words))
            sentence = f"there is no model or command {rest[0]!r}; did you mean {PROG} {' '.join(below.words)}?"
            return console.fail(name, sentence, "--json" in rest, console.USAGE)
        return int(importlib.import_module(command.module).main(rest))
    group = next(g for g in reversed(GROUPS) if tuple(arguments[: len(g.words)]) == g.words)
    rest = arguments[len(group.words) :]
    if rest and rest[0] in ("-h", "--help"):
        print(group_help(group), end="")
        return console.DONE
    name = " ".join((PROG, *group.words))
    if rest:
        own, at = group.words, len(group.words)
        known = dict.fromkeys(c.words[at] for c in COMMANDS if c.words[:at] == own and len(c.words) > at)
        close = meant(rest[0], FLAGS if rest[0].startswith("-") else known)
        hint = f"did you mean {name} {close}?" if close else f"{name} --help lists them"
        return console.fail(name, f"there is no command {rest[0]!r}; {hint}", "--json" in rest, console.USAGE)
    print(group_help(group), end="", file=sys.stderr)
    return console.USAGE

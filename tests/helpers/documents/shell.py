"""What bash would run of a document's commands, word by word, without running any: each program only leaves its words.

Bash itself expands variables, quotes, loops and pipes. It has no program to find, and what it has built in is replaced
where it would touch processes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pages import Command

SHELL = r"""
command_not_found_handle() { printf '%s\0' "$KVQ_AT" "$#" "$@" >&3; }
for name in kill wait exec cd exit source .; do eval "function $name() { :; }"; done
"""
HERE = ("/opt/vllm-kvq/bin/", ".venv/bin/")
"""Folders in front of programs."""
SILENT = {"MODEL": "MODEL"}
"""Variables that a document leaves to its reader."""


@dataclass(frozen=True)
class Run:
    """A program and its words; `at` is the number of the command that starts it."""

    at: int
    words: tuple[str, ...]


def runs(commands: Sequence[Command], folder: Path) -> list[Run]:
    """What the commands start, one after the other, in an empty folder."""
    lines = [SHELL]
    for number, command in enumerate(commands):
        text = command.text
        for place in HERE:
            text = text.replace(place, "")
        lines += [f"KVQ_AT={number}", text]
    log = folder / "runs"
    script = "\n".join([*lines, "builtin wait"])
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", f'exec 3>"$1"; {script}', "bash", str(log)],
        cwd=folder, env={"PATH": str(folder), **SILENT}, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    words, found = iter(log.read_text(encoding="utf-8").split("\0")[:-1]), []
    for number in words:
        found.append(Run(int(number), tuple(next(words) for _ in range(int(next(words))))))
    return found

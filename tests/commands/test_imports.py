"""What a mistyped command line waits for: nothing, or torch, which declares the formats; never vLLM."""

from __future__ import annotations

import subprocess
import sys

from vllm_kvq import cli

CODE = """
import sys
from vllm_kvq import cli
statuses = []
for line in {lines!r}:
    try:
        statuses.append(cli.main(line))
    except SystemExit as refused:
        statuses.append(refused.code)
print([module for module in ("torch", "transformers", "vllm") if module in sys.modules], statuses)
"""


def imported(*lines: list[str]) -> str:
    """Which of the large packages these command lines have imported, and their exit codes."""
    command = [sys.executable, "-c", CODE.format(lines=list(lines))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()[-1]


def test_the_list_of_commands_needs_nothing() -> None:
    wrong = imported(["format"], ["bench", "atention"], [], ["--versoin"])
    assert wrong == "[] [2, 2, 2, 2]"
    assert imported(["--version"], ["--help"], ["bench", "-h"]) == "[] [0, 0, 0]"


OWN = [list(command.words) for command in cli.COMMANDS if command.words not in (("check",), ("plan",))]
"""Those whose flags are ours: the others take vLLM's as well."""
TYPOS = ("formats squat3", "check --config missing", "check MODEL --kv-cache-dtype kity2", "plan /nope")
LINES = [*([*words, "MODEL", "--nonsense"] for words in OWN), *map(str.split, TYPOS)]


def test_the_commands_themselves_need_torch_at_most() -> None:
    """All in one process, because each would import torch again."""
    assert imported(*LINES) == f"['torch'] {[2] * len(LINES)}"

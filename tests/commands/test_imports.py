"""What a mistyped command line waits for: never vLLM, and torch only where a command runs kernels itself."""

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
large = {{"torch": "torch._C", "transformers": "transformers", "vllm": "vllm"}}
print([package for package, loaded in large.items() if loaded in sys.modules], statuses)
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


COMPUTING = ("conformance", "bench attention", "bench slow", "bench prefill", "bench serve", "bench gpu", "bench plot")
"""Commands whose modules import kernels, which import torch."""
OWN = [list(command.words) for command in cli.COMMANDS if command.words not in (("check",), ("plan",))]
"""Those whose flags are ours: the others take vLLM's as well."""
TYPOS = (
    "formats squat3",
    "formats --head-size 7",
    "check --config missing",
    "check MODEL --kv-cache-dtype kity2",
    "check MODEL --kv-cache-dtype squat2 --block-size 0",
    "check /nope --kv-cache-dtype kitty2",
    "plan /nope",
    "eval demo --formats squat3",
    "eval demo --formats squat2:r=0",
    "eval /nope",
    "eval heads demo --formats squat3",
    "eval answers demo --context 0",
    "calibrate demo --bits x",
    "bench decode /nope",
)
NONSENSE = [[*words, "MODEL", "--nonsense"] for words in OWN]


def test_words_files_and_the_table_of_formats_refuse_without_torch() -> None:
    wrong = [*map(str.split, TYPOS), *(line for line in NONSENSE if not " ".join(line).startswith(COMPUTING))]
    assert imported(*wrong) == f"[] {[2] * len(wrong)}"


def test_commands_that_compute_need_torch_at_most() -> None:
    """All in one process, because each would import torch again."""
    wrong = [line for line in NONSENSE if " ".join(line).startswith(COMPUTING)]
    assert len(wrong) == len(COMPUTING)
    assert imported(*wrong) == f"['torch'] {[2] * len(wrong)}"

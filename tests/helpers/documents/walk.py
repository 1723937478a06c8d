"""A walk through documents: from a clone in an empty folder, every command that they show, in their order.

What runs is what is written, except for the replacements that a walk names. A walk also names what it leaves out, each
with a reason, so a command that is added to a document runs in the next walk, or fails a test.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pip_settings
from pages import ROOT, Command, commands

from vllm_kvq.bench.servers.server import free_port
from vllm_kvq.eval.demo import demo_model
from vllm_kvq.kernels import build

MODELS = ("MODEL", "DRAFT", "Qwen/Qwen3-0.6B")
"""What documents call a reader's model: here folders with the demo model."""
SERVED = r"vllm serve \S+"
SHELL = """set -e
until_it_answers() {
    "$@" > served.log 2>&1 &
    until curl --silent --fail http://localhost:$PORT/health; do sleep 1; kill -0 $!; done
    curl --silent --fail http://localhost:$PORT/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "MODEL", "prompt": "A key-value cache is", "max_tokens": 8}' | grep '"completion_tokens":8'
    grep 'kvq: format=' served.log
    kill $!
    wait $!
}
"""
"""A server in the foreground runs until somebody stops it."""
FASTER = "--enforce-eager --shutdown-timeout 10"
"""Waiting for vLLM's own compiler is not what documents are about; running requests get time at a stop."""


@dataclass(frozen=True)
class Walk:
    pages: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    """What is written -> what is run."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """How a command begins -> why it does not run here."""
    prose: Mapping[str, str] = field(default_factory=dict)
    """How a block that is for nobody to run begins -> what it is."""
    python: Mapping[str, str] = field(default_factory=dict)
    """How a block of Python begins -> what its reader has before it."""

    def shown(self) -> list[Command]:
        """Commands of the pages; a block of Python counts as one, by its first line."""
        found = [c for page in self.pages for c in commands(page) if not c.block.startswith(tuple(self.prose))]
        return [c for c in found if c.block.startswith(c.text) or not c.block.startswith(tuple(self.python))]

    def left(self, command: Command) -> str | None:
        """The entry of `left_out`."""
        return next((start for start in self.left_out if command.text.startswith(start)), None)

    def run(self) -> list[Command]:
        return [command for command in self.shown() if self.left(command) is None]

    def unused(self) -> set[str]:
        """What this walk names and its documents do not show."""
        blocks = [command.block for page in self.pages for command in commands(page)]
        used = {self.left(command) for command in self.shown()}
        used |= {old for command in self.run() for old in self.replaced if old in command.text}
        used |= {start for start in (*self.python, *self.prose) if any(block.startswith(start) for block in blocks)}
        return {*self.replaced, *self.left_out, *self.python, *self.prose} - used

    def script(self, page: str, port: int) -> str:
        """For one shell. It writes the place of each command before it runs it."""
        lines = [SHELL]
        for command in self.run():
            if command.page == page:
                lines += [f"printf '\\n== {command.page}:{command.line}\\n'", self._runs(command, port)]
        return "\n".join(lines) + "\n"

    def _runs(self, command: Command, port: int) -> str:
        for start, before in self.python.items():
            if command.block.startswith(start):
                return f"python - <<'END'\n{before}\n{command.block}END"
        text = command.text
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        text = text.replace("localhost:8000", f"localhost:{port}")
        if re.match(SERVED, text) and not text.endswith("&"):
            text = f"until_it_answers {text}"
        return re.sub(SERVED, rf"\g<0> --port {port} {FASTER}", text)


def clone(folder: Path) -> Path:
    """This checkout as `git clone` makes it, after `make bootstrap`: `.venv` is this environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in MODELS:
        shutil.copytree(demo_model(), folder / name)
    return folder


def environment(home: Path) -> dict[str, str]:
    """A new user's, with the kernels of this checkout and little memory for caches; nothing is downloaded."""
    ours = ("VLLM_", "PYTHON", "HF_", "XDG_", "VIRTUAL_ENV")
    kept = {n: v for n, v in pip_settings.without_the_machines(os.environ).items() if not n.startswith(ours)}
    return {
        **kept,
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_KVQ_CACHE": str(build.build().parent),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def take(walk: Walk, folder: Path, variables: Mapping[str, str]) -> str:
    """Everything that the walk printed. AssertionError at the first command that fails."""
    port, printed = free_port("127.0.0.1"), ""
    for page in walk.pages:
        with subprocess.Popen(
            ["bash", "-s"], cwd=folder, env={**variables, "PORT": str(port)}, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as shell:  # fmt: skip
            try:
                said, _ = shell.communicate(walk.script(page, port), timeout=1500)
            finally:
                if shell.poll() is None:
                    os.killpg(shell.pid, signal.SIGKILL)
        printed += said
        log = folder / "served.log"
        assert shell.returncode == 0, said[-6000:] + (log.read_text()[-3000:] if log.exists() else "")
    places = [f"{command.page}:{command.line}" for command in walk.run()]
    assert [line[3:] for line in printed.splitlines() if line.startswith("== ")] == places
    return printed

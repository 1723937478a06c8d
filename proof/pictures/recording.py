"""`vllm-kvq check MODEL` as it looks in a terminal: runs the command, and keeps what it prints as an SVG."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

COLUMNS = 100
CACHE = "4G"
"""The cache of the server that `check` is asked about, so that the picture does not depend on free memory."""


def draw(path: Path, model: Path) -> None:
    """`model` is a checkpoint's folder; the command sees only the folder's name."""
    arguments = ["check", model.name, "--kv-cache-memory-bytes", CACHE]
    write(path, f"vllm-kvq {' '.join(arguments)}", run(arguments, model.parent))


def run(arguments: list[str], folder: Path) -> str:
    command = [sys.executable, "-m", "vllm_kvq", *arguments]
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)} exited with status {done.returncode}: {done.stderr[-400:]}")
    return done.stdout


def write(path: Path, command: str, printed: str) -> None:
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    console.print(Text(printed.rstrip("\n")))
    # rich's own template, without the font that it loads from the network
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    path.write_text(console.export_svg(title="vllm-kvq check", code_format=template), encoding="utf-8")

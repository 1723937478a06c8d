"""docs/architecture.md: its commands run, what it names exists, its boxes are the contract that `make lint` checks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", DOC, re.S)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]


def test_there_are_commands() -> None:
    assert len(COMMANDS) == DOC.count("    # ") == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    words = command.split()
    if words[0] == "make":  # CI has run it before the tests: here it is enough that there is such a target
        words.insert(1, "--dry-run")
    else:
        words[:1] = [sys.executable, "-m", "vllm_kvq"] if words[0] == "vllm-kvq" else [sys.executable]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_file_and_folder_exists() -> None:
    named = set(re.findall(r"[\w./-]+/(?:[\w-]+\.(?:py|md))?", DOC)) | set(re.findall(r"\]\(([^)#]+)\)", DOC))
    assert len(named) > 15
    package = ROOT / "vllm_kvq"
    rooms = ("kernels", "integration", "cli", "eval", "formats")
    places = (ROOT, ROOT / "docs", package, *(package / room for room in rooms))
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_every_name_in_the_three_ways_exists() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "vllm_kvq").rglob("*.py"))
    named = set(re.findall(r"\b(?:KVQImpl|Step|StepBatch|Served|PageFormat|Options|Problem)\b", DOC))
    assert len(named) == 7
    assert [name for name in sorted(named) if f"class {name}" not in sources] == []


def test_the_boxes_are_the_contract() -> None:
    """From top to bottom, as the first picture has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    house, *wings = [contract for contract in contracts if contract["type"] == "layers"]
    layers = house["layers"]
    boxes = [name.split(".")[-1] for layer in layers[1:] for name in layer.split(" | ")]
    picture = DOC[DOC.index("vllm_kvq/cli/") : DOC.index("csrc/  triton")]
    places = [re.search(rf"(vllm_kvq/|  ){box}[/.]", picture).start() for box in boxes]  # type: ignore[union-attr]
    assert places == sorted(places)
    floors = {wing["containers"][0].split(".")[-1]: wing["layers"] for wing in wings}
    text = DOC[DOC.index("## Layers within the packages") : DOC.index("## Key to bytes")]
    integration, rest = text.split("The layers of `cli`")
    command_line, rest = rest.split("The layers of `eval`")
    evaluation, formats = rest.split("The layers of `formats`")
    parts = ((integration, "integration"), (command_line, "cli"), (evaluation, "eval"), (formats, "formats"))
    for part, name in parts:
        packages = [floor for layer in floors[name] for floor in layer.split(" | ")]
        drawn = re.findall(r"(?<=    )(?:\w+\.py|\w+/)(?:  ?(?:\w+\.py|\w+/))*", part)
        rooms = [room.removesuffix(".py").removesuffix("/") for line in drawn for room in line.split()]
        there = [floor for floor in packages if (ROOT / "vllm_kvq" / name / floor).is_dir() or floor in rooms]
        assert sorted(rooms) == sorted(there)
        # from top to bottom
        level = {floor: n for n, layer in enumerate(floors[name]) for floor in layer.split(" | ")}
        lines = [[level[room.removesuffix(".py").removesuffix("/")] for room in line.split()] for line in drawn]
        assert all(max(above) < min(below) for above, below in pairwise(lines))

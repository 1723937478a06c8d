"""docs/upstream.md: every patch is there once, and the faults of vLLM that it shows are still there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from models_on_disk import SMALL, Written

from proof.models import named
from proof.models.checkpoints import write_model
from vllm_kvq.integration.patches.registry import PATCHES
from vllm_kvq.integration.preview.known_faults import KNOWN_FAULTS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
KNOWN = {
    "sampling-with-drafts": "With drafts, a sampled request spoils its batch on a CPU",
    "slow-stop": "After SIGTERM a server stays as long as clients keep streams open",
    "eager-pipeline": "Pipeline parallelism without a compiled model crashes on a CPU",
}
"""The titles of known faults, by their names."""


@dataclass(frozen=True)
class Shown:
    title: str
    code: str
    printed: tuple[str, ...]
    """The lines below the code."""

    @property
    def takes_a_model(self) -> bool:
        return "sys.argv[1]" in self.code


def shown(page: str = PAGE) -> list[Shown]:
    """The reproductions in Python, in the order of the page."""
    found = []
    for section in re.split(r"^### ", page, flags=re.M)[1:]:
        for code, output in re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", section, re.S):
            lines = tuple(line.removeprefix("    ") for line in output.splitlines())
            found.append(Shown(section.partition("\n")[0], code, lines))
    return found


SHOWN = shown()
QUICK = [x for x in SHOWN if not x.takes_a_model]
ENGINES = [x for x in SHOWN if x.takes_a_model]


def test_every_patch_is_there_once() -> None:
    rows = Counter(line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| "))
    rows.pop("patch", None)
    assert rows == Counter(patch.what for patch in PATCHES)


def test_every_known_fault_is_there() -> None:
    assert {fault.name for fault in KNOWN_FAULTS} == {*KNOWN}
    assert all(f"\n### {title}\n" in PAGE for title in KNOWN.values())


def test_each_reproduction_is_read() -> None:
    """None has lost the lines below it, which say what is wrong."""
    assert PAGE.count("```python\n") == len(SHOWN) == len(QUICK) + len(ENGINES)
    assert len(QUICK) > 5
    assert len(ENGINES) > 1
    sections = re.split(r"^### ", PAGE, flags=re.M)[1:]
    assert [s.partition("\n")[0] for s in sections if "```" not in s] == []


def run(reproduction: Shown, folder: Path, *arguments: str) -> str:
    script = folder / "reproduction.py"
    script.write_text(reproduction.code)
    plain = {**os.environ, "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, timeout=550)
    return done.stdout + done.stderr


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("reproduction", QUICK, ids=lambda x: f"{x.title[:30]} {x.printed[-1][:20]}")
def test_the_fault_is_there(reproduction: Shown, tmp_path: Path) -> None:
    """If this fails, vLLM may have mended it: then the patch and the section can go."""
    said = run(reproduction, tmp_path)
    assert [line for line in reproduction.printed if line not in said.splitlines()] == [], said[-2000:]


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("reproduction", ENGINES, ids=lambda x: x.title[:30])
def test_the_engine_still_crashes(reproduction: Shown, tmp_path: Path, written: Written) -> None:
    states = "Mamba" in reproduction.title
    model = tmp_path / "model"
    if states:
        write_model(named("Nemotron-H"), model)
    said = run(reproduction, tmp_path, str(model if states else written(**SMALL)))
    assert any(reproduction.printed[0] in line for line in said.splitlines()), said[-2000:]

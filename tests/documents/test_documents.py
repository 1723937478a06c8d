"""What documents promise: links lead somewhere, messages that they explain are the product's own, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import suite

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *ROOT.glob("docker/*.md"),
    *ROOT.glob("examples/*/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http", "#"))]
    assert [link for link in local if not (page.parent / link.partition("#")[0]).exists()] == []
    for link in local:
        path, _, anchor = link.partition("#")
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (page.parent / path).read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


FIRST_EXAMPLES = (
    *("README.md", "docker/README.md"),
    *(f"docs/{name}.md" for name in ("quickstart", "serving", "operating", "troubleshooting")),
)


@pytest.mark.parametrize("page", FIRST_EXAMPLES)
def test_first_examples_are_what_is_recommended(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"(?:vllm serve|vllm-kvq check) \S+ --kv-cache-dtype (\w+)|--kv-cache-dtype (\w+)$", text, re.M)
    named = [first or second for first, second in named]
    assert {*named} <= {RECOMMENDED, *BUDGETS[RECOMMENDED].formats, "auto", "F"}
    assert named[0] == RECOMMENDED


@pytest.mark.parametrize("page", [*FIRST_EXAMPLES, "docs/choosing.md", "docs/evaluation.md"])
def test_what_is_compared_first_is_what_is_recommended(page: str) -> None:
    """Evaluations begin with the recommended format, or with the default, which is compared with it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"vllm-kvq eval (?:answers |heads |humaneval )?MODEL\b[^`\n]*", text)
    named = [found[1].split(",") for command in commands if (found := re.search(r"--formats (\S+)", command))]
    assert {name.partition(":")[0] for names in named for name in names} <= {*suite("usual"), "fp8"}
    assert [names[0] for names in named[:1]] in ([], [BUDGETS[RECOMMENDED].formats[0]])


def test_the_first_format_in_python_is_one_that_is_recommended() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r'(?:roundtrip\(|FORMATS\[)"(\w+)"', text)
    assert len(named) == 2
    assert {*named} <= {*BUDGETS[RECOMMENDED].formats}


@pytest.mark.parametrize(
    ("file", "default"),
    [
        ("docker/compose.yaml", r"\$\{FORMAT:-(\w+)\}"),
        ("docker/vllm-kvq.service", r"FORMAT=(\w+)"),
        ("docs/operating.md", r"^FORMAT=(\w+)"),
        *((f"examples/{name}.py", r"--kv-cache-dtype (\w+)") for name in ("batch", "ray_batch", "ray_serve")),
    ],
)
def test_what_runs_elsewhere_has_the_same_default(file: str, default: str) -> None:
    assert {*re.findall(default, (ROOT / file).read_text(encoding="utf-8"), re.M)} == {RECOMMENDED}


FOREIGN = ("argument --kv-cache-dtype", "PackageNotFoundError", "Available memory", "No available memory", "... needed",
           "Not enough allowed NUMA", "libtcmalloc", "kill -9", "CPU Generator", "--enforce-eager",
           "--kv-cache-dtype auto")  # fmt: skip
"""vLLM's words, Python's, and flags."""


def test_troubleshooting_explains_messages_that_exist() -> None:
    """Word for word, except for what a message fills in."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").replace("\n", " ")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "vllm_kvq").glob("**/*.py"))
    said = re.sub(r'"\n\s*f?"', "", sources)  # a sentence may continue on the next line
    headings = [m for heading in re.findall(r"\*\*(.*?)\*\*", text) for m in re.findall(r"`([^`]*)`", heading)]
    ours = [message for message in headings if not message.startswith(FOREIGN)]
    assert len(ours) > 6
    pieces = [p.strip() for m in ours for p in re.split(r"\.\.\.|'\w+'|\b(?:auto|squat2|PyTorch|0\.\d\d)\b", m)]
    assert [piece for piece in pieces if len(piece) > 3 and piece not in said] == []


def test_the_tables_of_quality_are_what_was_measured() -> None:
    """`python scripts/quality_tables.py` prints the lines of the pages."""
    command = [sys.executable, str(ROOT / "scripts" / "quality_tables.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    names = ("quality", "peers", "regression", "papers")
    pages = "".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in names)
    assert len(lines) > 80
    assert [line for line in lines if line not in pages] == []


@pytest.mark.parametrize("page", ["fuzz", "fuzz-72", "fuzz-v2", "residues"])
def test_numbers_of_requests_are_those_of_the_recorded_runs(page: str) -> None:
    recorded = (ROOT / f"docs/results/{page}.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^ +total +(.*)$", recorded, re.M)
    requests = int(row.split()[2])
    words = " ".join((ROOT / "docs/testing.md").read_text(encoding="utf-8").split())
    before, _, _ = words.partition(f"(results/{page}.md)")
    assert re.findall(r"[\d,]*\d,\d{3}", before)[-1] == f"{requests:,}"


def test_recorded_results_name_models_and_no_folders() -> None:
    """`eval` writes the model as it was given, which may be a path on the machine that measured."""
    folder = ROOT / "docs" / "results" / "quality"
    paths = [*folder.glob("real-*.csv"), *folder.glob("generated-*.csv")]
    models = {line.partition(",")[0] for path in paths for line in path.read_text(encoding="utf-8").splitlines()[1:]}
    assert models
    assert not [model for model in models if "/" in model]
    found = [path.name for path in folder.glob("*.csv") if "/lib/python" in path.read_text(encoding="utf-8")]
    assert found == [], "an error of a program names the folder of Python"

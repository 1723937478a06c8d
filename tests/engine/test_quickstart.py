"""docs/quickstart.md, copied and pasted: its blocks in one shell, with a model of ours and a free port."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_kvq.bench.server import free_port

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
INSTALL, REST = DOC.split("## Choose a model")
PASTED = "\n".join(re.findall(r"```sh\n(.*?)```", REST, re.S))


def test_to_the_first_answer(model: Path, tmp_path: Path) -> None:
    port = str(free_port("127.0.0.1"))
    # waiting the way vLLM's own compiler does takes a minute more, and is not what this page is about
    changed = {"MODEL=Qwen/Qwen3-0.6B": f"MODEL={model}", "localhost:8000": f"localhost:{port}",
               "vllm serve ": f"vllm serve --port {port} --enforce-eager ",
               'kv_cache_dtype="kitty2", ': 'kv_cache_dtype="kitty2", enforce_eager=True, '}  # fmt: skip
    script = PASTED
    for old, new in changed.items():
        assert old in script
        script = script.replace(old, new)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with subprocess.Popen(
        ["bash", "-e"], cwd=tmp_path, env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as shell:  # fmt: skip
        try:
            out, err = shell.communicate(script, timeout=500)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(shell.pid)], check=False)
    log = (tmp_path / "server.log").read_text()
    assert shell.returncode == 0, out[-2000:] + err[-2000:] + log[-2000:]
    assert re.search(r"kvq: format=kitty2 bits=\S+ .* capacity_tokens=\d+", out)
    answer, end = json.JSONDecoder().raw_decode(out, out.index('{"id"'))
    assert answer["usage"]["completion_tokens"] == 32
    assert out[end:].strip()  # what Python printed


def test_what_it_installs_is_declared() -> None:
    """CI has run `make kernels` before the tests; what pip is asked for is declared."""
    assert re.findall(r"```sh\n(.*?)```", INSTALL, re.S) == ["make kernels\n. .venv/bin/activate\n"]
    assert "\nkernels: bootstrap\n" in (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.findall(r"pip install '\.\[(\w+)\]'", INSTALL)} == {"gpu"} <= set(extras)

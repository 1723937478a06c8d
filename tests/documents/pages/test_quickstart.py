"""docs/quickstart.md, copied and pasted: its blocks in one shell, with a model of ours and a free port."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pages
import pytest
import walk

pytestmark = pytest.mark.engine
PAGE = "docs/quickstart.md"
INSTALL = (pages.ROOT / PAGE).read_text(encoding="utf-8").split("## Choose a model")[0]
QUICKSTART = walk.Walk(
    (PAGE,),
    replaced={'kv_cache_dtype="kvq3", ': 'kv_cache_dtype="kvq3", enforce_eager=True, '},
    left_out={
        "make kernels": "CI has run it",
        ". .venv/bin/activate": "this environment",
        "python3 -m venv .venv": "an NVIDIA GPU",
        "pip install '.[gpu]'": "an NVIDIA GPU",
    },
)


@pytest.mark.wide
def test_to_the_first_answer(model: Path, tmp_path: Path) -> None:
    assert QUICKSTART.unused() == set()
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen3-0.6B").symlink_to(model)
    out = walk.take(QUICKSTART, tmp_path, walk.environment(tmp_path))
    assert re.search(r"kvq: format=klt3 bits=\S+ .* capacity_tokens=\d+", out)
    answer, end = json.JSONDecoder().raw_decode(out, out.index('{"id"'))
    assert answer["usage"]["completion_tokens"] == 32
    assert out[end:].strip()  # what Python printed


def test_what_it_installs_is_declared() -> None:
    """CI has run `make kernels` before the tests; what pip is asked for is declared."""
    assert re.findall(r"```sh\n(.*?)```", INSTALL, re.S) == ["make kernels\n. .venv/bin/activate\n"]
    assert "\nkernels: bootstrap\n" in (pages.ROOT / "Makefile").read_text()
    extras = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.findall(r"pip install '\.\[(\w+)\]'", INSTALL)} == {"gpu"} <= set(extras)

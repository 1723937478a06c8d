"""examples/int4_hadamard, a format of another package, judged by the oracle: every token is its reference's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import example_format
import pytest

pytestmark = pytest.mark.engine
NAME = "int4_hadamard"
HELPERS = Path(__file__).parents[2] / "helpers" / "engines"


def judged(installed: Path, model: Path) -> dict[str, Any]:
    """The oracle's verdict on traces of an engine that serves the format."""
    environment = example_format.environment(installed)
    environment["PYTHONPATH"] += os.pathsep + str(HELPERS)
    command = [sys.executable, str(HELPERS / "judge_format.py"), NAME, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_token_is_the_references(model: Path, tmp_path: Path) -> None:
    verdict = judged(example_format.install(tmp_path), model)
    assert not verdict["mismatches"]
    assert verdict["tokens"] > 300
    assert verdict["hits"] >= 3
    assert verdict["ties"] <= 0.02 * verdict["tokens"]


ROTATED = "    def query_features(self, query: torch.Tensor) -> torch.Tensor:\n        return self.rotate(query)\n"


def changed(to: str) -> Callable[[str], str]:
    """The example with something else in place of the rotation of queries."""

    def change(code: str) -> str:
        assert ROTATED in code
        return code.replace(ROTATED, ROTATED.replace("self.rotate(query)", to))

    return change


@pytest.mark.wide
def test_the_oracle_notices_a_query_that_is_not_rotated(model: Path, tmp_path: Path) -> None:
    """In steps only, or the server would not start."""
    broken = changed("self.rotate(query) if query.dim() == 3 else query")
    assert judged(example_format.install(tmp_path, broken), model)["mismatches"]


@pytest.mark.wide
def test_a_broken_codec_is_refused_before_weights_load(model: Path, tmp_path: Path) -> None:
    environment = example_format.environment(example_format.install(tmp_path, changed("query")))
    command = [sys.executable, "-m", "vllm_kvq", "check", str(model), "--kv-cache-dtype", NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stderr[-4000:]
    assert re.search(
        rf"--kv-cache-dtype {NAME}: query_features\(q\) . key_features\(page\) differs from q . unpack\(page\) by \S+; "
        rf"vllm-kvq conformance --formats {NAME} lists all that is wrong with it",
        " ".join((done.stdout + done.stderr).split()),
    )

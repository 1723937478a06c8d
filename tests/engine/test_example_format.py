"""examples/int4_hadamard, a format of another package, judged by the oracle: every token is its reference's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import example_format
import pytest

pytestmark = pytest.mark.engine
NAME = "int4_hadamard"
HERE = Path(__file__).parent


def judged(installed: Path, model: Path) -> dict[str, Any]:
    """The oracle's verdict on traces of an engine that serves the format."""
    environment = example_format.environment(installed)
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    command = [sys.executable, str(HERE / "judge_format.py"), NAME, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_token_is_the_references(model: Path, tmp_path: Path) -> None:
    verdict = judged(example_format.install(tmp_path), model)
    assert not verdict["mismatches"]
    assert verdict["tokens"] > 300
    assert verdict["hits"] >= 3
    assert verdict["ties"] <= 0.02 * verdict["tokens"]


def test_the_oracle_notices_a_query_that_is_not_rotated(model: Path, tmp_path: Path) -> None:
    right = "    def query_features(self, query: torch.Tensor) -> torch.Tensor:\n        return self.rotate(query)\n"

    def break_it(code: str) -> str:
        assert right in code
        return code.replace(right, right.replace("self.rotate(query)", "query"))

    assert judged(example_format.install(tmp_path, break_it), model)["mismatches"]

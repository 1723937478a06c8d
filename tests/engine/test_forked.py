"""Engines are forked from one process, which keeps the environment of its start, but get the caller's environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from proof.oracle.forked import EngineProcess

pytestmark = pytest.mark.engine
NAME = "VLLM_KVQ_POLAR_SCORES"


def variable(_engine: Any) -> str | None:
    return os.environ.get(NAME)


def test_engines_have_the_variables_of_who_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("dot", "table", None):
        monkeypatch.setenv(NAME, value) if value else monkeypatch.delenv(NAME)
        with EngineProcess(str(model), {"block_size": 32}, {}) as process:
            assert process.call(variable) == value

"""Engines are forked from one process, which keeps the environment of its start, but get the caller's environment."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from proof.oracle.engines.forked import EngineProcess, call

pytestmark = pytest.mark.engine
NAME = "VLLM_KVQ_ISA"


def variable(_engine: Any) -> str | None:
    return os.environ.get(NAME)


def test_engines_have_the_variables_of_who_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("portable", "avx2", None):
        monkeypatch.setenv(NAME, value) if value else monkeypatch.delenv(NAME)
        with EngineProcess(str(model), {"block_size": 32}, {}) as process:
            assert process.call(variable) == value


def has_imported_vllm() -> bool:
    return "vllm.v1.worker.cpu_worker" in sys.modules


def test_another_user_of_multiprocessing_does_not_make_them_cold() -> None:
    """The evaluation forks its engines too, from a server that imports less."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    other = context.Process(target=has_imported_vllm)
    other.start()
    other.join()
    assert call(has_imported_vllm)

"""The random models that tests start engines with, each written once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq.bench.models.random_model import random_model

Written = Callable[..., Path]

SMALL: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}
"""Two layers, four query and two KV heads of 64, float32."""
TINY: dict[str, Any] = {"hidden": 64, "layers": 1, "heads": 1, "kv_heads": 1}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """written(**arguments of random_model) -> its folder, which tests read but don't write to."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[tuple[tuple[str, Any], ...], Path] = {}

    def write(**shape: Any) -> Path:
        key = tuple(sorted(shape.items()))
        if key not in known:
            known[key] = random_model(folder / f"model{len(known)}", **shape)
        return known[key]

    return write


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, written: Written) -> Path:
    """The model of a test module: the shape that it calls `SHAPE`, or a small one."""
    return written(**getattr(request.module, "SHAPE", SMALL))

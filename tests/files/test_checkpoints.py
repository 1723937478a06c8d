"""All who ask for a checkpoint's weights find the same files: for memory, for constants, and for the evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from vllm_kvq.eval.model import Model
from vllm_kvq.integration.plan import calibration
from vllm_kvq.integration.plan.model.weights import WEIGHTS, checkpoint_bytes


def config(name: str) -> Any:
    model = SimpleNamespace(model=name, revision=None)
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto"))


@pytest.mark.parametrize("pattern", WEIGHTS)
def test_files_of_every_kind_are_weights(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "model_meaning", lambda model: ["name", "revision", {}])
    asked = config(str(tmp_path))
    assert calibration._identity(asked) is None
    assert checkpoint_bytes(asked.model_config) == 0
    (tmp_path / pattern.replace("*", "model")).write_bytes(bytes(1000))
    assert calibration._identity(asked) is not None
    assert checkpoint_bytes(asked.model_config) == 1000
    assert Model("", tmp_path, "", None, 0, 0, 0, 0).weight_bytes == 1000


def test_the_same_weights_in_another_kind_of_files_count_once(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "all.bin"):
        (tmp_path / name).write_bytes(bytes(1000))
    assert checkpoint_bytes(config(str(tmp_path)).model_config) == 2000


def test_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert checkpoint_bytes(config("some/model").model_config) == 0
    cached = tmp_path / "models--some--model"
    folder = cached / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(bytes(1000))
    assert checkpoint_bytes(config("some/model").model_config) == 1000
    # not the name of a model
    assert checkpoint_bytes(config("s3://some/model").model_config) == 0

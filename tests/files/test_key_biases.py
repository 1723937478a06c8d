"""Key biases are read for advice only: a damaged file stops no server, and a fault of our own is not hidden by that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_kvq.integration.advice import key_biases


def asked(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    def fails(*_: object) -> dict[int, float]:
        raise error

    monkeypatch.setattr(key_biases, "key_biases", fails)
    monkeypatch.setattr(key_biases, "weights_folder", lambda *_: Path("folder"))
    counts = {f"get_{name}": int for name in ("total_num_kv_heads", "head_size", "total_num_hidden_layers")}
    model = SimpleNamespace(model="model", revision=None, **counts)
    return key_biases.of_model(SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto")))


@pytest.mark.parametrize("error", [SafetensorError(), OSError(), ValueError()], ids=lambda e: type(e).__name__)
def test_a_damaged_file_gives_no_biases(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, error) == {}


def test_a_fault_of_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="ours"):
        asked(monkeypatch, AttributeError("ours"))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_one_of_these_errors(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError):
        key_biases.key_biases(tmp_path, 1, 1, 2)


@pytest.mark.parametrize("shape", [(), (2, 1), (3,)])
def test_a_bias_of_another_shape_is_none(shape: tuple[int, ...], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.bias"
    save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
    assert key_biases.key_biases(tmp_path, 1, 1, 2) == {0: pytest.approx(2**0.5)}
    save_file({name: torch.ones(shape)}, tmp_path / "model.safetensors")
    assert key_biases.key_biases(tmp_path, 1, 1, 2) == {}

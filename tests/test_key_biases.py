"""Key biases are read for advice only: a damaged file stops no server, and a fault of our own is not hidden by that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from vllm_kvq.integration.advice import key_biases


def asked(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    def fails(*_: object) -> dict[int, float]:
        raise error

    monkeypatch.setattr(key_biases, "key_biases", fails)
    monkeypatch.setattr(key_biases, "weights_folder", lambda *_: Path("folder"))
    counts = {f"get_{name}": int for name in ("total_num_kv_heads", "head_size", "total_num_hidden_layers")}
    model = SimpleNamespace(model="model", revision=None, **counts)
    return key_biases.of_model(SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto")))


@pytest.mark.parametrize(
    "error", [SafetensorError(), OSError(), ValueError(), KeyError()], ids=lambda e: type(e).__name__
)
def test_a_damaged_file_gives_no_biases(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, error) == {}


def test_a_fault_of_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="ours"):
        asked(monkeypatch, AttributeError("ours"))

"""Measurements on disk: whole, or not there."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_kvq.eval.choice import choices
from vllm_kvq.eval.run import store
from vllm_kvq.eval.run.comparison import REFERENCE, Comparison
from vllm_kvq.eval.run.store import Store

ARRAYS = {"kl": np.arange(1000.0), "top": np.arange(3)}


def kept(folder: Path) -> tuple[Store, Path]:
    found = Store(folder)
    found.put("figures", "one", ARRAYS)
    return found, found.path("figures", "one")


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    found, path = kept(tmp_path)
    assert found.has("figures", "one")
    again = found.get("figures", "one")
    assert again is not None
    assert all(np.array_equal(again[name], x) for name, x in ARRAYS.items())
    assert [*path.parent.iterdir()] == [path]
    assert not found.has("figures", "two")
    assert found.get("figures", "two") is None


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_truncated_measurement_is_none(share: float, tmp_path: Path) -> None:
    found, path = kept(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert not found.has("figures", "one")
    assert found.get("figures", "one") is None
    found.put("figures", "one", ARRAYS)
    assert found.has("figures", "one")


def test_a_damaged_measurement_is_made_again(tmp_path: Path) -> None:
    """A byte in the middle: only reading all of it shows it."""
    found, path = kept(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert found.get("figures", "one") is None
    assert not found.has("figures", "one")


def test_any_changed_byte_costs_a_measurement_at_most(tmp_path: Path) -> None:
    """Never a traceback or other numbers: not even in what says how a part is compressed or whether it is encrypted."""
    found = Store(tmp_path)
    path = found.path("figures", "one")
    found.put("figures", "one", {"kl": np.arange(9.0)})
    data = path.read_bytes()
    for at in range(len(data)):
        for change in (1, 255):
            path.write_bytes(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])
            again = found.get("figures", "one")
            assert again is None or "kl" not in again or np.array_equal(again["kl"], np.arange(9.0))


def test_a_folder_that_can_not_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="can't keep a measurement: Not a directory; name another --cache"):
        Store(tmp_path / "file" / "cache")
    found = Store(tmp_path)
    with pytest.raises(OSError, match="can't keep a measurement: File exists; name another --cache"):
        found.put("file", "one", ARRAYS)


def test_a_user_without_a_home_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert store.default_folder().name == "eval"


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, **arrays: np.ndarray) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found, path = kept(tmp_path)
    monkeypatch.setattr(store.np, "savez", full)
    with pytest.raises(OSError, match="can't keep a measurement: No space left on device; name another --cache"):
        found.put("figures", "two", ARRAYS)
    assert [*path.parent.iterdir()] == [path]


@dataclass(frozen=True)
class OfLength(Comparison):
    max_len: int = 128


def test_what_is_named_stays_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name for the same inputs would have every measurement made again. The hashes were recorded."""
    monkeypatch.setattr(store, "sources", lambda: "all sources")
    monkeypatch.setattr(store, "format_sources", lambda name: f"sources of {name}")
    model: Any = SimpleNamespace(digest=lambda: "weights", dtype="float32", folder="model")
    found = OfLength(model, (REFERENCE,))
    names = [store.key(**found.served(choice), bits_at=100) for choice in choices("auto,squat2:S=0")]
    assert names == [
        "25367874a90bf3723131d9b33a647380",
        "71d102218165e23836aba3476aeafd1a",
    ]

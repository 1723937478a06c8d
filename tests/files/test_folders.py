"""Which folder has what: compiled kernels, fitted constants, and measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kvq.eval.run import store
from vllm_kvq.integration.plan import calibration
from vllm_kvq.kernels import build, trust
from vllm_kvq.kernels.folders import CACHE
from vllm_kvq.kernels.variables import VARIABLES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, where the package's own is not trusted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CACHE, raising=False)
    real = trust.folder_writers
    monkeypatch.setattr(trust, "folder_writers", lambda at: "somebody" if at == build.BUILT else real(at))
    return tmp_path / "cache" / "vllm_kvq"


def test_the_users_cache(user: Path) -> None:
    assert (build._cache_dir(), calibration._folder()) == (user, user / "calibration")
    assert store.default_folder() == user / "eval"


def test_a_folder_that_the_user_names(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the table of variables says, and measurements stay where they are."""
    named = tmp_path / "named"
    monkeypatch.setenv(CACHE, str(named))
    assert (build._cache_dir(), calibration._folder()) == (named, named / "calibration")
    assert store.default_folder() == user / "eval"
    assert VARIABLES[CACHE] == "folder for compiled kernels and fitted constants"


@pytest.mark.parametrize("text", [f'"{CACHE}"', "XDG_CACHE_HOME"])
def test_one_module_decides(text: str) -> None:
    """The table of variables names all of them."""
    modules = {str(path.relative_to(ROOT / "vllm_kvq")) for path in (ROOT / "vllm_kvq").rglob("*.py")}
    read = {name for name in modules if text in (ROOT / "vllm_kvq" / name).read_text(encoding="utf-8")}
    assert read - {"kernels/variables.py"} == {"kernels/folders.py"}

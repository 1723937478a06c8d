"""A process that was started in the checkout: vLLM looks for a package `triton_kernels`, and we have such a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_kvq
from vllm_kvq.integration.patches.registered import own_sources

pytestmark = pytest.mark.engine
ROOT = Path(vllm_kvq.__file__).resolve().parents[1]
WHAT_VLLM_FINDS = """
import json, sys
from vllm.utils import import_utils
found = import_utils.has_triton_kernels()
import vllm.model_executor.layers.fused_moe.config  # looks into the package, and logs what it misses
module = sys.modules.get("triton_kernels")
print(json.dumps([found, getattr(module, "__file__", None)]))
"""
WITH_PLUGIN = "from vllm_kvq.integration.plugin import register; register()\n"
WITHOUT_FOLDERS = """
import os, sys
sys.path = [p for p in sys.path if not os.path.isdir(os.path.join(p or ".", "triton_kernels"))]
"""


MISSES = "Failed to import Triton kernels"


def child(code: str, folder: Path, *path: Path) -> tuple[Any, str]:
    """Start a process in this folder, with these folders on the path; returns its last line and its log."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_the_folder_is_no_regular_package() -> None:
    assert (ROOT / "triton_kernels" / "attend.py").is_file()
    assert not (ROOT / "triton_kernels" / "__init__.py").exists()
    import vllm_kvq.triton_kernels as ours

    assert [Path(place).resolve() for place in ours.__path__] == [ROOT / "triton_kernels"]


@pytest.mark.wide
def test_vllm_finds_what_it_finds_in_an_empty_folder(tmp_path: Path) -> None:
    elsewhere, log = child(WITHOUT_FOLDERS + WHAT_VLLM_FINDS, tmp_path)
    assert MISSES not in log
    here, log = child(WITH_PLUGIN + WHAT_VLLM_FINDS, ROOT, ROOT)
    assert here == elsewhere
    assert "triton_kernels" not in log
    # the control: without the plugin it takes our folder for the package, and fails to find its contents
    here, log = child(WHAT_VLLM_FINDS, ROOT, ROOT)
    assert here != elsewhere
    assert MISSES in log


@pytest.mark.wide
def test_vllm_does_not_look_before_it_loads_plugins() -> None:
    """Whatever a process imports first: a script, `vllm serve`, `python -m`, an engine or a worker."""
    code = """
import json, sys
import vllm.entrypoints.cli.main, vllm.entrypoints.cli.serve, vllm.entrypoints.openai.api_server
import vllm.v1.engine.core, vllm.v1.executor.multiproc_executor
from vllm import LLM
print(json.dumps("vllm.model_executor.layers.fused_moe.config" in sys.modules))
"""
    looked, log = child(code, ROOT, ROOT)
    assert not looked
    assert "triton_kernels" not in log


@pytest.mark.wide
def test_a_real_package_later_on_the_path_wins(tmp_path: Path) -> None:
    (tmp_path / "triton_kernels").mkdir()
    real = tmp_path / "triton_kernels" / "__init__.py"
    real.write_text("")
    assert child(WITH_PLUGIN + WHAT_VLLM_FINDS, ROOT, ROOT, tmp_path)[0] == [True, str(real)]


def test_another_checkout_is_hidden_and_a_foreign_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "vllm_kvq").mkdir()
    (tmp_path / "triton_kernels").mkdir()
    assert not own_sources._is_our_folder(tmp_path / "triton_kernels")
    (tmp_path / "vllm_kvq" / "triton_kernels").symlink_to("../triton_kernels")
    assert own_sources._is_our_folder(tmp_path / "triton_kernels")

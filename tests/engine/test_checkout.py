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
from vllm_kvq.integration import compat

pytestmark = pytest.mark.engine
ROOT = Path(vllm_kvq.__file__).resolve().parents[1]
WHAT_VLLM_FINDS = """
import json, sys
from vllm.utils import import_utils
found = import_utils.has_triton_kernels()
module = sys.modules.get("triton_kernels")
print(json.dumps([found, getattr(module, "__file__", None)]))
"""
WITH_PLUGIN = "from vllm_kvq.integration.plugin import register; register()\n"
WITHOUT_FOLDERS = """
import os, sys
sys.path = [p for p in sys.path if not os.path.isdir(os.path.join(p or ".", "triton_kernels"))]
"""


def child(code: str, folder: Path, *path: Path) -> Any:
    """What a process that was started in this folder, with these folders on the path, prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "No module named 'triton_kernels" not in done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_the_folder_is_no_regular_package() -> None:
    assert (ROOT / "triton_kernels" / "decode.py").is_file()
    assert not (ROOT / "triton_kernels" / "__init__.py").exists()
    import vllm_kvq.triton_kernels as ours

    assert [Path(place).resolve() for place in ours.__path__] == [ROOT / "triton_kernels"]


def test_vllm_finds_what_it_finds_in_an_empty_folder(tmp_path: Path) -> None:
    elsewhere = child(WITHOUT_FOLDERS + WHAT_VLLM_FINDS, tmp_path)
    assert child(WITH_PLUGIN + WHAT_VLLM_FINDS, ROOT, ROOT) == elsewhere
    # the control: without the plugin it would find our folder
    assert child(WHAT_VLLM_FINDS, ROOT, ROOT) != elsewhere


def test_a_real_package_later_on_the_path_wins(tmp_path: Path) -> None:
    (tmp_path / "triton_kernels").mkdir()
    real = tmp_path / "triton_kernels" / "__init__.py"
    real.write_text("")
    assert child(WITH_PLUGIN + WHAT_VLLM_FINDS, ROOT, ROOT, tmp_path) == [True, str(real)]


def test_another_checkout_is_hidden_and_a_foreign_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "vllm_kvq").mkdir()
    (tmp_path / "triton_kernels").mkdir()
    assert not compat._is_our_folder(tmp_path / "triton_kernels")
    (tmp_path / "vllm_kvq" / "triton_kernels").symlink_to("../triton_kernels")
    assert compat._is_our_folder(tmp_path / "triton_kernels")

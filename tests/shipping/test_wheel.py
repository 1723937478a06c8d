"""The wheel contains what a serving process and the user's commands need, works by itself, and has no instruments."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from vllm_kvq import __version__

ROOT = Path(__file__).resolve().parents[2]
INSTRUMENTS = ("oracle", "fuzz", "soak", "ptx", "demo/", "proof", "probe")
PARTS = ("bench", "cli", "eval", "formats", "integration", "kernels", "triton_kernels", "csrc/cpu", "csrc/cuda")


def script() -> ModuleType:
    """scripts/build_wheel.py, which makes the wheel with compiled kernels from the same copy (test_shipping.py)."""
    spec = importlib.util.spec_from_file_location("build_wheel", ROOT / "scripts" / "build_wheel.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tracked = script().repository_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "out"))
    script().copy_repository(source)
    return script().pip_wheel(source, out)


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(unpacked: Path, *arguments: str) -> str:
    """Python's output, with the unpacked wheel on the path and without the checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_it_holds_nothing_else(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"vllm_kvq", f"vllm_kvq-{__version__}.dist-info"}
    assert [name for name in names if any(word in name for word in INSTRUMENTS)] == []


@pytest.mark.parametrize("part", PARTS)
def test_it_holds_every_file_of(part: str, names: set[str]) -> None:
    """Also for folders that are links in the checkout."""
    at_the_top = part.startswith(("csrc", "triton_kernels"))
    wanted = {f"vllm_kvq/{name}" for name in tracked(part)} if at_the_top else tracked(f"vllm_kvq/{part}")
    assert wanted
    assert {name for name in names if name.startswith(f"vllm_kvq/{part}/")} == wanted


def test_type_checkers_read_its_annotations(names: set[str]) -> None:
    assert "vllm_kvq/py.typed" in names


def test_the_compilers_find_their_sources(unpacked: Path) -> None:
    code = (
        "from vllm_kvq.kernels import build\n"
        "for folder in (build.source_dir(), build.source_dir('cuda')):\n"
        "    print(*(p for p in folder.rglob('*') if p.is_file()), sep='\\n')"
    )
    found = {str(Path(line).relative_to(unpacked / "vllm_kvq")) for line in run(unpacked, "-c", code).splitlines()}
    assert found == tracked("csrc/cpu") | tracked("csrc/cuda")


def test_it_works_by_itself(unpacked: Path) -> None:
    code = (
        "import vllm_kvq, vllm_kvq.kernels.gpu.step, vllm_kvq.kernels.cpu.step, importlib.util as u\n"
        "print(vllm_kvq.__file__); print(u.find_spec('vllm_kvq.triton_kernels.attend').origin)\n"
        "print(u.find_spec('triton_kernels'))"
    )
    package = unpacked / "vllm_kvq"
    assert run(unpacked, "-c", code).splitlines() == [
        str(package / "__init__.py"),
        str(package / "triton_kernels" / "attend.py"),
        "None",
    ]
    listed = run(unpacked, "-m", "vllm_kvq", "formats")
    assert any(line.split()[:2] == ["squat2", "SQuat,"] for line in listed.splitlines())

"""A wheel with compiled kernels, installed as the images install it, serves without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path

import clean_environment
import pytest

from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.bench.servers.server import Server, free_port
from vllm_kvq.eval.demo import demo_model
from vllm_kvq.kernels import build

ROOT = Path(__file__).resolve().parents[2]
FIRST_TOKEN_SECONDS = 60
BEFORE = """
import runpy, sys
sys.path[0] = {packages!r}
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("numpy", "torch", "vllm"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
script = runpy.run_path({script!r})
"""
"""The first stage's Python runs the script: this project is not installed there, because files that name folders (.pth)
are not read, and there is no torch."""


def first_stage(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    before = BEFORE.format(packages=sysconfig.get_path("purelib"), script=str(ROOT / "scripts" / "build_wheel.py"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-c", before + code, *arguments],
        cwd=ROOT.parent,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage of docker/Dockerfile.cpu makes."""
    folder = tmp_path_factory.mktemp("wheels")
    made = first_stage("sys.exit(script['main']())", "--output", str(folder))
    assert made.returncode == 0, made.stderr
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), "packaging/vllm-alias"], cwd=ROOT, check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def clean(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment after docker/install.sh."""
    folder = tmp_path_factory.mktemp("clean")
    clean_environment.make(folder)
    done = install(folder, "cpu", str(wheels))
    assert done.returncode == 0, done.stderr
    assert f"{build.prebuilt_name()} is loaded" in done.stdout
    assert not any(list(folder.glob(f"venv/lib/python*/site-packages/{name}*")) for name in clean_environment.BROKEN)
    return folder


def test_the_first_stage_needs_no_installed_project(tmp_path: Path) -> None:
    """With a compiler that makes only headers of libraries: what is tested here is that it is asked at all."""
    compiler, copy = tmp_path / "compiler", tmp_path / "copy"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\n'
        "{ printf '\\177ELF\\002'; head -c 59 /dev/zero; } > \"$2\"\n"
    )
    compiler.chmod(0o755)
    (copy / "vllm_kvq").mkdir(parents=True)
    code = "import pathlib; script['add_library'](pathlib.Path(sys.argv[1]))"
    done = first_stage(code, str(copy), CXX=str(compiler), VLLM_KVQ_CACHE=str(tmp_path / "kernels"))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in copy.rglob("*.so")] == [build.prebuilt_name()]


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "docker" / "install.sh"), *arguments],
        cwd=folder,
        env=clean_environment.variables(folder),
        capture_output=True,
        text=True,
        timeout=300,
    )


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "venv" / "bin" / program), *arguments],
        cwd=folder,
        env=clean_environment.variables(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_wheel_says_where_it_runs(wheels: Path) -> None:
    (wheel,) = wheels.glob("vllm_kvq-*.whl")
    assert "-py3-none-manylinux_2_" in wheel.name
    assert wheel.name.endswith("_x86_64.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name]
    # all instruction sets in one file, and no other library bundled
    assert libraries == [f"vllm_kvq/_prebuilt/{build.prebuilt_name()}"]


def test_without_a_compiler_its_library_serves(clean: Path) -> None:
    assert not any((clean / "tools" / name).exists() for name in ("cc", "c++", "gcc", "g++", "clang", "clang++"))
    code = (
        "import logging, torch, vllm_kvq; logging.basicConfig(level=0)\n"
        "from vllm_kvq.kernels.cpu.library import ISAS, library\n"
        "from vllm_kvq.kernels.paths import Wish, path_for\n"
        "from vllm_kvq.formats import Geometry, get_format\n"
        "print(vllm_kvq.__file__, library().names('isas'))\n"
        "print(path_for(get_format('squat2').bind(Geometry(64, 128, torch.float32), {}), Wish('cpu')).name)"
    )
    done = run(clean, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    where, path = done.stdout.splitlines()
    assert where.split()[0].startswith(str(clean / "venv"))
    assert where.split()[1:] == ["portable", "avx2", "avx512bw", "avx512"]
    assert path == "C++"
    assert "compiling" not in done.stderr


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["python", "-m", "vllm_kvq.kernels"], "CPU kernels can't be built: the compiled library in "),
        pytest.param(
            ["vllm", "serve", "--kv-cache-dtype", "squat2", "--skip-tokenizer-init"],
            "vllm-kvq: --kv-cache-dtype squat2: the compiled library in ",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_library_of_other_sources_is_one_sentence(
    command: list[str], sentence: str, clean: Path, tmp_path: Path
) -> None:
    """The server never falls back to the slower kernels."""
    model = random_model(tmp_path / "model", hidden=128, layers=2, heads=4, kv_heads=2)
    (header,) = (clean / "venv").glob("lib/python*/site-packages/vllm_kvq/csrc/cpu/half.h")
    text = header.read_text()
    header.write_text(text + "// changed\n")
    try:
        done = run(clean, *command, *(["--model", str(model)] if "serve" in command else []))
    finally:
        header.write_text(text)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(sentence)
    assert last.endswith("was not built from the installed C++ sources; reinstall vllm-kvq")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "install: usage: install.sh cpu|gpu FOLDER"),
        (("tpu", "{wheels}"), "install: usage: install.sh cpu|gpu FOLDER"),
        (("cpu", "/no/such/folder"), "install: there must be one vllm_kvq wheel in /no/such/folder"),
    ],
)
def test_install_says_what_is_wrong(arguments: tuple[str, ...], sentence: str, wheels: Path, tmp_path: Path) -> None:
    done = install(tmp_path, *(argument.format(wheels=wheels) for argument in arguments))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == sentence


@pytest.mark.engine
@pytest.mark.wide
def test_the_first_token_comes_within_a_minute(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = demo_model()
    port = free_port("127.0.0.1")
    arguments = ["--kv-cache-dtype", "squat2", "--enforce-eager", "--served-model-name", "demo"]
    server = Server(str(model), arguments, "127.0.0.1", port, tmp_path / "log")
    server.command[0] = str(clean / "venv" / "bin" / "vllm")
    for name in ("PYTHONPATH", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**clean_environment.variables(clean), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(clean)
    started = time.monotonic()
    with server:
        server.wait_until_healthy(240)
        body = {"model": "demo", "prompt": "How does SQuat work?", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 1
        seconds = time.monotonic() - started
        log = server.read_log()
        assert server.stop() == 0
    with capsys.disabled():
        print(f" first token {seconds:.0f} s after vllm serve", end="")
    assert "path=C++" in log
    assert "compiling" not in log
    assert seconds < FIRST_TOKEN_SECONDS

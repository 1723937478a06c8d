"""Building the C++ kernels: other processors, other compilers, none at all."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from proof.kernels import sanitize
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels import build, compiled
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.cpu import layout, library
from vllm_kvq.kernels.cpu import step as cpu_step
from vllm_kvq.kernels.paths import Wish, path_for, step_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Caches, Step, StepBatch
from vllm_kvq.kernels.torch.step import PlannedStep


def cross_compiler() -> list[str] | None:
    """g++ for aarch64, else the clang that comes with `pip install ziglang`."""
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    return None


@pytest.mark.skipif(cross_compiler() is None, reason="no aarch64-linux-gnu-g++ and no ziglang")
def test_compiles_for_aarch64(tmp_path: Path) -> None:
    includes, _, _ = build.ffi()
    for source in build.sources(build.source_dir()):
        command = [*(cross_compiler() or []), *build.FLAGS, "-O1", "-Werror", *(f"-isystem{i}" for i in includes)]
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(tmp_path / "object.o")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]


def test_without_a_compiler_pytorch_answers_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    # the real functions, uncached: the library that this process may already have is not theirs
    monkeypatch.setattr(library, "load", build.load.__wrapped__)
    uncached = functools.cache(library.library.__wrapped__)
    for module in (cpu, layout, cpu_step):
        monkeypatch.setattr(module, "library", uncached)
    fmt = get_format("kivi2").bind(Geometry(64, 32, torch.float32), {"W": 32, "S": 0})
    slots, cpu_device = SlotGeometry.of(fmt, 1, 0), torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        paths = [path_for(fmt, Wish("cpu")) for _ in range(2)]
        served = [step_for(path, fmt, slots, 0, 0.125, cpu_device) for path in paths]
    assert [path.name for path in paths] == ["PyTorch", "PyTorch"]
    assert "can't be built" in (paths[0].why or "")
    got, want = (_prompt(step, fmt, slots) for step in (served[0], PlannedStep(fmt, slots, 0, 0.125, cpu_device)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    warnings = [r.getMessage() for r in caplog.records if "no C++ kernels" in r.getMessage()]
    assert len(warnings) == 1
    assert "no-such-compiler" in warnings[0]
    assert "\n" not in warnings[0]


def _prompt(step: Step, fmt: PageFormat, slots: SlotGeometry) -> torch.Tensor:
    """A prompt in two chunks: the output of the second, whose history is packed."""
    blocks = 5 + slots.sidecar_blocks
    pages = torch.zeros(blocks, 1, fmt.record_bytes, dtype=torch.uint8)
    caches = Caches(pages, torch.zeros(blocks, slots.page_bytes // 4), None)
    ids = torch.arange(1, blocks, dtype=torch.int32)[None]
    query, key, value = torch.randn(3, 100, 1, 64, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(query)
    for first, last in ((0, 90), (90, 100)):
        start, seq = (torch.tensor(x, dtype=torch.int32) for x in ([0, last - first], [last]))
        batch = StepBatch(start, start, seq, ids[:, :4], ids[:, 4:], None, last - first)
        tokens = (x[first:last] for x in (query, key, value))
        assert step.run(batch, caches, *tokens, out[first:last]) == 0
    assert pages.any()
    return out


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file where a compiler notes what it is asked for; it takes its time, and makes only headers of libraries."""
    asked, compiler = tmp_path / "asked", tmp_path / "compiler"
    compiler.write_text(f"""#!/bin/sh
[ "$1" = --version ] && exit
echo "$@" >> {asked}
sleep 0.1
while [ "$1" != -o ]; do shift; done
{{ printf '\\177ELF\\002'; head -c 59 /dev/zero; }} > "$2"
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    # for when vLLM has been set up in this process: the lines of its loggers do not reach the root
    monkeypatch.setattr(build, "logger", logging.getLogger("test_cpu_build"))
    return asked


def test_compiling_says_how_long_and_how_far(asked: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build.build()
        first, *others = [r.getMessage() for r in caplog.records]
        caplog.clear()
        build.build()
    many = len(build.sources(build.source_dir()))
    assert re.match(r"kvq: compiling the C\+\+ kernels, once, on \d+ cores: about \d+ minutes? \(", first)
    said = [re.fullmatch(r"kvq: (\d+) of (\d+) sources compiled after \d+ s", line) for line in others]
    counts = [(int(match[1]), int(match[2])) for match in said if match]
    assert len(counts) == len(others)
    assert counts == sorted(counts)
    assert (counts[-1], {total for _, total in counts}) == ((many, many), {many})
    assert len(counts) > 2
    assert caplog.records == []


def test_it_is_not_silent_for_long(
    asked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While one source takes a long time."""
    monkeypatch.setattr(build, "SILENT_SECONDS", 0.2)
    with caplog.at_level(logging.INFO):
        build._compile([["sleep", "1.1"]], 1)
    assert len([r for r in caplog.records if "kvq: 0 of 1 sources compiled" in r.getMessage()]) >= 3


def test_a_source_that_does_not_compile_ends_it(asked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(compiler.read_text().replace("sleep 0.1", "sleep 0.1; echo no space left >&2; exit 1"))
    with pytest.raises(build.BuildError, match="no space left"):
        build.build()
    # those that ran at that moment, and no more
    assert len(asked.read_text(encoding="utf-8").splitlines()) < len(build.sources(build.source_dir()))


def test_a_full_disk_is_named(asked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing half-written is found later."""
    folder = asked.parent
    said = "cc1plus: fatal error: error writing to x.s: No space left on device"
    (folder / "compiler").write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exit\necho '{said}\ncompilation terminated.' >&2\nexit 1\n"
    )
    monkeypatch.setattr(library, "load", build.load.__wrapped__)
    assert library.library.__wrapped__() is None
    (record,) = (r for r in caplog.records if "no C++ kernels" in r.getMessage())
    assert record.getMessage().endswith(f"{said}; {build._ROOM}")
    assert {path.name for path in folder.iterdir()} == {"compiler", "lock"}


@pytest.mark.parametrize("zeros", [False, True], ids=["truncated", "zeros"])
def test_a_damaged_library_is_compiled_again(zeros: bool, asked: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loader would not notice, and the process would die."""
    path = build.build()
    lines = len(asked.read_text(encoding="utf-8").splitlines())
    assert build.build() == build.built() == path
    assert len(asked.read_text(encoding="utf-8").splitlines()) == lines
    path.write_bytes(bytes(path.stat().st_size) if zeros else path.read_bytes()[:40])
    assert build.built() is None
    with caplog.at_level(logging.WARNING):
        assert build.build() == path
    assert "is damaged; it is compiled again" in caplog.text
    assert len(asked.read_text(encoding="utf-8").splitlines()) == 2 * lines


@pytest.mark.skipif(library.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_truncated_library_is_not_loaded(share: float, tmp_path: Path) -> None:
    whole = build.build().read_bytes()
    path = tmp_path / "library.so"
    path.write_bytes(whole[: int(share * len(whole))])
    assert not compiled.is_there(path)
    with pytest.raises(ValueError, match="damaged"):
        compiled.load(path)
    path.write_bytes(whole)
    assert compiled.is_there(path)


def test_a_cache_that_can_not_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(build.BuildError, match="/folder, which can't be made into a folder: Not a directory"):
        build.build()


def test_a_wheel_brings_its_library(asked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "_prebuilt")
    build.PREBUILT.mkdir()
    carried = build.PREBUILT / build.prebuilt_name()
    carried.touch()
    assert build.build() == carried
    assert not asked.exists()
    # it is damaged: no other kernels in its place
    with pytest.raises(build.WheelError, match=r"can't be loaded: .*; reinstall vllm-kvq"):
        build.load.__wrapped__()
    # the user's own flags ask for a library of their own
    monkeypatch.setenv(build.EXTRA_FLAGS, "-O2")
    assert build.build() != carried
    monkeypatch.delenv(build.EXTRA_FLAGS)
    carried.rename(build.PREBUILT / "cpu-0123456789abcdef.so")
    with pytest.raises(build.WheelError, match="was not built from the installed C\\+\\+ sources"):
        build.build()
    # no announced fall-back, unlike without a compiler
    monkeypatch.setattr(library, "load", build.load.__wrapped__)
    with pytest.raises(build.WheelError):
        library.library.__wrapped__()


def test_one_compiles_and_the_others_wait(asked: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(3) as pool:
        built = {future.result() for future in [pool.submit(build.build) for _ in range(3)]}
    assert any(r.getMessage().startswith("kvq: waiting for another process") for r in caplog.records)
    sources = [str(path) for path in build.source_dir().rglob("*.cpp")]
    lines = asked.read_text(encoding="utf-8").splitlines()
    assert len(built) == 1
    assert built.pop().exists()
    # every source once, and one link
    assert sorted(line.split(" -c ")[1].split()[0] for line in lines if " -c " in line) == sorted(sources)
    assert len(lines) == len(sources) + 1


@pytest.mark.parametrize("text", ["adress", "thread,address"])
def test_sanitizers_that_can_not_be(text: str) -> None:
    with pytest.raises(ValueError, match="sanitizer"):
        sanitize.parse(text)

"""Where compiling fails and what is read afterwards: full and read-only disks, killed compilers, changed libraries."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_kvq.kernels import build, compiled
from vllm_kvq.kernels.gpu import build as build_cuda

ROOT = Path(__file__).parents[3]
BUILD = "from vllm_kvq.kernels.build import main; raise SystemExit(main())"
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit
{before}
while [ "$1" != -o ]; do shift; done
{{ printf '\\177ELF\\002'; head -c {size} /dev/zero; }} > "$2"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, with a compiler that makes only headers of libraries."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(folder))
    compiles(tmp_path)
    return folder


def compiles(folder: Path, before: str = "", size: int = 59) -> None:
    (folder / "compiler").write_text(COMPILER.format(before=before, size=size))
    (folder / "compiler").chmod(0o755)


def python(code: str, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([*before, sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def own_mounts() -> bool:
    done = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize(
    ("options", "said", "advice"),
    [("size=64k", "No space left on device", build._ROOM), ("ro", "Read-only file system", build._ELSEWHERE)],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_nothing(options: str, said: str, advice: str, cache: Path) -> None:
    """Real disks, in a namespace of their own: one sentence says what to do, and nothing half-written stays."""
    if not own_mounts():
        pytest.skip("this system doesn't let us mount anything")
    compiles(cache.parent, size=1 << 15)
    script = f'mount -t tmpfs -o {options},mode=755 none {cache} && "$@"; status=$?; ls {cache}; exit $status'
    done = python(BUILD, "unshare", "-rm", "sh", "-c", script, "sh")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert said in last
    assert last.endswith(advice)
    assert "Traceback" not in done.stderr
    assert done.stdout.split() in ([], ["lock"])


def test_a_compiler_that_is_killed(cache: Path) -> None:
    compiles(cache.parent, before="echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1")
    with pytest.raises(build.BuildError, match=r"terminated program cc1plus; free some memory, or compile one source"):
        build.build()


def test_killed_while_it_compiles(cache: Path) -> None:
    """The next process does not wait for the dead one, and removes what that left without reading it."""
    compiles(cache.parent, before="sleep 600")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen([sys.executable, "-c", BUILD], env=env, process_group=0, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not [*cache.glob("tmp-*")]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert [*cache.glob("tmp-*")]
    assert build.built() is None
    compiles(cache.parent)
    path = build.build()
    assert {*cache.iterdir()} == {path, cache / "lock"}


@pytest.mark.parametrize("home", ["/nowhere", None])
def test_a_user_without_a_home(home: str | None) -> None:
    """As in a container with an arbitrary user, who is in no file of users: Python finds no home."""
    if os.getuid():
        pytest.skip("only root can become another user")
    code = "import os, pathlib\nfrom vllm_kvq.kernels import build\n"
    code += "os.setgid(1234567); os.setuid(1234567)\n"
    code += "def refuse(*_, **__): raise OSError(30, 'Read-only file system')\npathlib.Path.mkdir = refuse\n"
    code += "try: build._cache_dir()\nexcept build.BuildError as error: print(error)"
    env = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "VLLM_KVQ_CACHE")}
    env |= {"PYTHONPATH": str(ROOT), "HOME": home or ""}
    if home is None:
        del env["HOME"]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert "_build can't be made (Read-only file system)" in done.stdout
    assert ("/nowhere/.cache/vllm_kvq can't be made" in done.stdout) is (home is not None)
    assert done.stdout.strip().endswith(build._OWN)


def test_a_library_for_another_processor(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build()
    data = bytearray(compiled.unsealed(path.read_bytes()))
    struct.pack_into("<H", data, compiled.MACHINE_AT, 0xF3 if compiled._machine() != 0xF3 else 0x3E)
    path.write_bytes(data)
    assert compiled.why_not(path) == "is for another kind of processor"
    assert build.built() is None
    with pytest.raises(ValueError, match="the file is for another kind of processor"):
        compiled.load(path)
    assert compiled.why_not(build.build()) is None


@pytest.mark.parametrize("at", [70, 1000, -compiled.SEAL_BYTES - 1, -1])
def test_a_changed_byte(at: int, cache: Path) -> None:
    """In the code or in its hash: the loader would not notice, and the kernels might compute something else."""
    compiles(cache.parent, size=5000)
    path = build.build()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert compiled.why_not(path) == "is damaged"
    assert build.built() is None
    assert compiled.why_not(build.build()) is None


def test_a_changed_byte_of_cuda_kernels(cache: Path) -> None:
    """A library for a GPU that someone else can write to isn't loaded either."""
    compiles(cache.parent, size=5000)
    path = build_cuda.run_compiler([str(cache.parent / "compiler")], cache / "cuda.so")
    assert compiled.why_not(path) is None
    path.chmod(0o777)
    with pytest.raises(
        build.BuildError, match=r"cuda\.so can't be loaded: the file is not trusted, because every user"
    ):
        build_cuda._load(path)
    path.chmod(0o755)
    path.write_bytes(path.read_bytes().replace(b"\0\0", b"\0\1", 1))
    with pytest.raises(build.BuildError, match=r"cuda\.so can't be loaded: the file is damaged"):
        build_cuda._load(path)


def test_one_process_compiles_cuda_kernels(cache: Path) -> None:
    """The other ranks of a server wait for it; what a killed one has left is removed."""
    asked, dead = cache.parent / "asked", cache / f"{build._UNFINISHED}dead"
    compiles(cache.parent, before=f"echo >> {asked}; sleep 0.2")
    dead.mkdir()
    command, target = [str(cache.parent / "compiler")], cache / "cuda.so"
    with ThreadPoolExecutor(3) as pool:
        made = {future.result() for future in [pool.submit(build_cuda.run_compiler, command, target) for _ in "abc"]}
    assert made == {target}
    assert len(asked.read_text().splitlines()) == 1
    assert {*cache.iterdir()} == {target, cache / "lock"}


def test_nvcc_is_understood_in_every_language(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in every encoding: the names of files need not be UTF-8."""
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    said = 'text="No space left on device"; [ "$LC_ALL" = C ] || text="Kein Platz"'
    compiles(cache.parent, before=f"{said}; printf 'error: \\344.cu: %s\\n' \"$text\" >&2; exit 1")
    monkeypatch.setattr(build_cuda, "nvcc", lambda: str(cache.parent / "compiler"))
    with pytest.raises(build.BuildError) as caught:
        build_cuda.build(90)
    assert str(caught.value).endswith(f"\ufffd.cu: No space left on device; {build._ROOM}")


def test_a_wheels_library_has_no_hash(cache: Path) -> None:
    """patchelf rewrites it."""
    sealed = build.build().read_bytes()
    assert len(compiled.unsealed(sealed)) == len(sealed) - compiled.SEAL_BYTES
    assert compiled.unsealed(compiled.unsealed(sealed)) == compiled.unsealed(sealed)

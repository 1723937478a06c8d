"""Compiled code that someone else can have written is not loaded."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.kernels import build, compiled, trust
from vllm_kvq.kernels.gpu import build as build_cuda

A_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
OTHER, GROUP = 1234567, 7654321
"""Numbers that no user and no group has."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    path = folder / "cpu.so"
    path.touch(mode=0o644)
    return path


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def test_ones_own_are_trusted(library: Path) -> None:
    assert trust.writers(library) is None
    library.chmod(0o755)
    library.parent.chmod(0o700)
    assert trust.writers(library) is None


@pytest.mark.parametrize("which", ["library", "folder"])
def test_what_everybody_can_write(which: str, library: Path) -> None:
    at = library if which == "library" else library.parent
    for mode in (0o777, 0o1777):
        at.chmod(mode)
        assert trust.writers(library) == f"every user can write to {at}"


def test_a_folder_above(library: Path) -> None:
    """Where everybody may put another folder in the place of ours; in /tmp they may not."""
    library.parent.parent.chmod(0o777)
    assert trust.writers(library) == f"every user can write to {library.parent.parent}"
    library.parent.parent.chmod(0o1777)
    assert trust.writers(library) is None


def test_no_safer_than_the_package(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the umask is 0, everybody may change the Python files as well."""
    package = library.parent.parent
    monkeypatch.setattr(trust, "PACKAGE", package)
    for path in (package, library.parent, library):
        path.chmod(0o777)
    assert trust.writers(library) is None
    package.chmod(0o755)
    assert trust.writers(library) == f"every user can write to {library}"
    library.chmod(0o755)
    assert trust.writers(library) == f"every user can write to {library.parent}"


@needs_root
@pytest.mark.parametrize("which", ["library", "folder"])
def test_another_users(which: str, library: Path) -> None:
    at = library if which == "library" else library.parent
    os.chown(at, OTHER, -1)
    assert trust.writers(library) == f"{at} belongs to user {OTHER}"


@needs_root
def test_the_owner_of_the_package_is_trusted(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root runs a server from a user's checkout: that user could change the sources, too."""
    os.chown(library, OTHER, -1)
    package = tmp_path / "trust.py"
    package.touch()
    os.chown(package, OTHER, -1)
    monkeypatch.setattr(trust, "__file__", str(package))
    assert trust.writers(library) is None


def test_a_group_that_can_write(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that the user has to himself is allowed, as Debian's and Red Hat's umask of 002 expects."""
    me = pwd.getpwuid(os.getuid())
    library.chmod(0o664)
    own = SimpleNamespace(gr_name=me.pw_name, gr_gid=library.stat().st_gid, gr_mem=[])
    monkeypatch.setattr(trust, "ROOT", -1)
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name=me.pw_name, pw_gid=own.gr_gid))
    for group, trusted in (
        (own, True),
        (SimpleNamespace(**{**vars(own), "gr_mem": [me.pw_name]}), True),
        (SimpleNamespace(**{**vars(own), "gr_mem": ["someone"]}), False),
        (SimpleNamespace(**{**vars(own), "gr_name": "users"}), False),
    ):
        monkeypatch.setattr(trust.grp, "getgrgid", lambda _, group=group: group)
        why = None if trusted else f"the group {group.gr_name} can write to {library}"
        assert trust.writers(library) == why
    monkeypatch.setattr(trust.grp, "getgrgid", lambda _: own)
    monkeypatch.setattr(trust, "_has_access_list", lambda _: True)
    assert trust.writers(library) is not None


@needs_root
def test_a_group_without_a_name(library: Path) -> None:
    with pytest.raises(KeyError):
        grp.getgrgid(GROUP)
    os.chown(library.parent, -1, GROUP)
    library.parent.chmod(0o775)
    assert trust.writers(library) == f"the group {GROUP} can write to {library.parent}"
    os.chown(library.parent, -1, 0)  # root's group counts as root
    assert trust.writers(library) is None


def test_an_access_list(library: Path) -> None:
    """Its writers are seen as a group that can write, which seems to be root's here."""
    everyone, rights = 0xFFFFFFFF, {1: (6, None), 2: (6, OTHER), 4: (4, None), 16: (6, None), 32: (4, None)}
    entries = [struct.pack("<HHI", tag, may, everyone if who is None else who) for tag, (may, who) in rights.items()]
    try:
        os.setxattr(library, trust.ACCESS_LIST, struct.pack("<I", 2) + b"".join(entries))
    except OSError:
        pytest.skip("a file system without access lists")
    assert library.stat().st_mode & 0o777 == 0o664
    assert trust.writers(library) is not None


# -- where kernels are kept ------------------------------------------------------------------------------------------
def refuses(who: str, monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    own: Any = trust.folder_writers
    monkeypatch.setattr(trust, "folder_writers", lambda at: who if at in folders else own(at))


def test_the_folder_that_the_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled into it, and nothing is loaded from it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(folder))
    with pytest.raises(build.BuildError) as caught:
        build.build()
    assert str(caught.value) == (
        f"VLLM_KVQ_CACHE is {folder}, from which no library is loaded, because every user can write to {folder}; "
        f"{build._OWN}"
    )
    assert build.built() is None
    assert not [*folder.iterdir()]


def test_folders_that_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's if it is trusted, else the user's, else a sentence."""
    monkeypatch.delenv("VLLM_KVQ_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own, user = build.BUILT, tmp_path / "vllm_kvq"
    real = trust.folder_writers
    monkeypatch.setattr(trust, "folder_writers", lambda at: None if at == own else real(at))
    assert build._cache_dir() == own
    refuses("WHO", monkeypatch, own)
    assert build._cache_dir() == user
    assert user.stat().st_mode & 0o777 == 0o755
    user.chmod(0o777)
    with pytest.raises(build.BuildError, match=f"{own} is not trusted, because WHO, {user} is not trusted, because "):
        build._cache_dir()


def test_what_the_owner_has_compiled_serves_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an image: root has compiled it into the package, and the server's user can't write there."""
    monkeypatch.delenv("VLLM_KVQ_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(build, "BUILT", tmp_path / "package")
    monkeypatch.setattr(build_cuda, "nvcc", lambda: None)
    real = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: at != build.BUILT and real(at, mode))
    assert "no built library in" in (build_cuda.why_not((9, 0)) or "")
    library = build.BUILT / f"cuda-sm90-{build_cuda._digest(build_cuda.FLAGS)}.so"
    library.parent.mkdir(exist_ok=True)
    shutil.copy(A_LIBRARY, library)
    assert build_cuda.why_not((9, 0)) is None
    assert build_cuda.build(90) == library
    assert not [*(tmp_path / "user").rglob("*.so")]
    # but not what anyone but the owner can have written
    library.chmod(0o777)
    assert "no built library in" in (build_cuda.why_not((9, 0)) or "")


def test_what_is_compiled_here_is_only_ours_to_write(tmp_path: Path) -> None:
    made, old = tmp_path / "made", os.umask(0)
    try:
        made.touch()
        compiled.publish(made, tmp_path / "cpu.so")
    finally:
        os.umask(old)
    assert (tmp_path / "cpu.so").stat().st_mode & 0o777 == 0o755


def test_a_library_that_became_writable_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\n'
        "{ printf '\\177ELF\\002'; head -c 59 /dev/zero; } > \"$2\"\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path))
    path = build.build()
    path.chmod(0o777)
    assert build.built() is None
    with pytest.raises(ValueError, match="the file is not trusted, because every user can write to "):
        compiled.load(path)
    assert build.build() == path == build.built()
    assert path.stat().st_mode & 0o777 == 0o755

"""Who else could have written a compiled library: its code runs with the rights of whoever starts the server.

Trusted are root, the user that this process runs as, and the owner of the installed package, who could change its
sources as well. A file and its folder must belong to one of them, and nobody else may write to them: not others, and
not a group, unless it is root's or the owner's own group, which has no other member. Folders above count only if
everybody may rename what is in them. So whoever can write to a folder above as its owner or as a member of its group
is trusted, too. Nothing is refused that would also let somebody change the package's Python files: a library is as safe
as the code that loads it, and can't be safer.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0
PACKAGE = Path(__file__).resolve().parents[1]
ACCESS_LIST = "system.posix_acl_access"
"""The extended attribute with a file's access list, whose writers the bits for the group stand for."""


def writers(library: Path) -> str | None:
    """Who else could have changed this file, as a clause; None: nobody."""
    library = library.resolve()
    return _of(library) or folder_writers(library.parent)


def folder_writers(folder: Path) -> str | None:
    """Who else could put a file into this folder, or another folder into its place."""
    folder = folder.resolve()
    if (who := _of(folder)) is not None:
        return who
    for above in folder.parents:
        if above == PACKAGE or above in PACKAGE.parents:
            break
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user can write to {above}"
    return None


def _of(path: Path) -> str | None:
    found = path.stat()
    if found.st_uid not in _owners():
        return f"{path} belongs to user {_name(found.st_uid)}"
    as_open = PACKAGE.stat().st_mode if path.is_relative_to(PACKAGE) else 0
    if found.st_mode & ~as_open & stat.S_IWOTH:
        return f"every user can write to {path}"
    if found.st_mode & ~as_open & stat.S_IWGRP and not _is_private(path, found):
        return f"the group {_group(found.st_gid)} can write to {path}"
    return None


def _owners() -> set[int]:
    return {ROOT, os.geteuid(), os.stat(__file__).st_uid}


def _is_private(path: Path, found: os.stat_result) -> bool:
    """Whether only trusted users are in the group: root's, or one that a user has to himself."""
    if _has_access_list(path):
        return False
    if found.st_gid == ROOT:
        return True
    try:
        group = grp.getgrgid(found.st_gid)
        users = [pwd.getpwuid(user) for user in {found.st_uid, os.geteuid()}]
    except KeyError:
        return False
    return any(
        user.pw_gid == group.gr_gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
        for user in users
    )


def _has_access_list(path: Path) -> bool:
    try:
        return ACCESS_LIST in os.listxattr(path)
    except OSError:
        return False


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _group(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)

"""The folders of csrc/cpu are floors: a file includes only files of its own folder or of lower floors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "csrc" / "cpu"
FLOORS: tuple[tuple[str, ...], ...] = (
    ("library",),
    ("step",),
    ("attend",),
    ("attend/amx",),
    ("attend/avx2", "attend/vnni"),
    ("attend/integer",),
    ("attend/float32",),
    ("pack",),
    ("pack/kinds",),
    ("dispatch",),
    ("isa",),
    ("",),
)
"""From top to bottom. The files at the root are the bottom; folders of one floor don't include each other."""
FLOOR = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}


def includes(root: Path) -> Iterator[tuple[str, str]]:
    """(file, file that it includes), both relative to `root`."""
    for path in sorted(root.rglob("*.[hc]*")):
        for name in re.findall(r'^ *# *include "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            target = (path.parent / name).resolve()
            assert target.is_file(), f"{path} includes {name}, which does not exist"
            yield path.relative_to(root).as_posix(), target.relative_to(root.resolve()).as_posix()


def upward(root: Path) -> list[str]:
    found = []
    for source, target in includes(root):
        above, below = os.path.dirname(source), os.path.dirname(target)
        if above != below and FLOOR[above] >= FLOOR[below]:
            found.append(f"{source} includes {target}")
    return found


def test_no_include_goes_up() -> None:
    assert upward(ROOT) == []


def test_every_folder_has_a_floor() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.[hc]*")}
    assert {"" if folder == "." else folder for folder in folders} == set(FLOOR)


def test_an_include_that_goes_up_is_found(tmp_path: Path) -> None:
    for folder in ("isa", "pack", "attend/avx2", "attend/vnni"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "layout.h").write_text("")
    (tmp_path / "isa" / "lanes.h").write_text('#include "../layout.h"\n#include <vector>\n')
    (tmp_path / "pack" / "table.h").write_text('#include "../isa/lanes.h"\n')
    assert upward(tmp_path) == []
    (tmp_path / "attend" / "vnni" / "table.h").write_text('#include "../avx2/table.h"\n')
    (tmp_path / "attend" / "avx2" / "table.h").write_text("")
    (tmp_path / "isa" / "matrix.h").write_text('#include "../pack/table.h"\n')
    assert upward(tmp_path) == [
        "attend/vnni/table.h includes attend/avx2/table.h",
        "isa/matrix.h includes pack/table.h",
    ]

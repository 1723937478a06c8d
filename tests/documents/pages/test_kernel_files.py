"""docs/adding-a-format.md: the files that it lists for a codec with kernels are those that name the codec."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs" / "adding-a-format.md").read_text(encoding="utf-8").partition("## Fast kernels")[2]
FOLDERS = ("vllm_kvq/formats", "vllm_kvq/kernels", "csrc/cpu", "triton_kernels", "configs")
USERS = {
    "configs/squat2.yaml",
    "vllm_kvq/formats/budgets.py",
    "vllm_kvq/formats/constants.py",
    "vllm_kvq/formats/option.py",
    "vllm_kvq/formats/methods/squat.py",
}
"""They use the codec or only mention it."""


def listed() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", DOC, re.M))


def naming(word: str) -> set[str]:
    """The files of the kernels and formats that have this word. Presets choose among formats and belong to none."""
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".yaml") and path.parent.name != "presets"
    ]
    return {str(path.relative_to(ROOT)) for path in files if re.search(word, path.read_text(encoding="utf-8"), re.I)}


def test_the_files_of_a_codec_with_kernels() -> None:
    assert listed() == naming("boosted|kitty") - USERS
    assert naming("boosted|kitty") >= USERS


def test_their_number() -> None:
    words = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}
    own = {name for name in listed() if re.search("boosted|kitty", name)}
    assert f"in {len(listed())} files, {words[len(own)]} of which serve only them" in DOC

"""The documents' pictures show the recorded results and the formats as they are now."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from proof.pictures import hit, quality
from proof.pictures.canvas import fingerprint
from proof.pictures.main import FOLDER, PICTURES, RECORDING, file_name, main
from proof.pictures.page import bound
from vllm_kvq.cli.check.every import HEAD, ranked

ROOT = Path(__file__).parent.parent


def described(svg: str) -> str | None:
    found = re.search(r"<dc:description>(\w+)</dc:description>", svg)
    return found and found[1]


@pytest.mark.parametrize("module", PICTURES, ids=file_name)
def test_is_up_to_date(module: ModuleType) -> None:
    drawn = (FOLDER / file_name(module)).read_text()
    assert described(drawn) == fingerprint(module.data()), "run python -m proof pictures"


def test_a_result_that_has_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in quality.RESULTS.glob("real-*-4096.csv"):
        (tmp_path / path.name).write_text(path.read_text().replace(",polar4,", ",polar5,"))
    monkeypatch.setattr(quality, "RESULTS", tmp_path)
    assert described((FOLDER / file_name(quality)).read_text()) != fingerprint(quality.data())


def test_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture names what it shows, and the same data gives the same bytes."""
    monkeypatch.setattr("proof.pictures.main.be_quiet", lambda: None)
    for folder in ("first", "second"):
        assert main(["--out", str(tmp_path / folder)]) == 0
    for module in PICTURES:
        first, second = ((tmp_path / folder / file_name(module)).read_bytes() for folder in ("first", "second"))
        assert first == second
    assert all(
        f">{point.name}<" in (tmp_path / "first/quality.svg").read_text() for point in quality.points("qwen2.5-1.5b")
    )


def test_the_recording_shows_check_as_it_is() -> None:
    drawn = (FOLDER / RECORDING).read_text().replace("&#160;", " ")
    for word in (*HEAD, *ranked(), "switch on", "go back"):
        assert word in drawn, f"{word!r}: run python -m proof pictures --check MODEL"
    assert "url(" not in drawn.replace("url(#", ""), "a picture loads nothing from the network"


def test_each_picture_is_in_a_document() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = "\n".join(path.read_text() for path in documents)
    for path in FOLDER.iterdir():
        assert f"pictures/{path.name})" in shown, path.name


def test_the_hit_is_what_the_engine_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's manager finds whole blocks up to the limit that ours gives it."""
    from vllm_kvq.integration.core import manager

    fmt, found = bound(), []
    monkeypatch.setattr(
        manager.FullAttentionManager, "find_longest_cache_hit", lambda hashes, limit, *_: found.append(limit)
    )
    spec, pool = SimpleNamespace(recomputed=fmt.W), SimpleNamespace(hash_block_size=fmt.N)
    for tokens in range(fmt.N, 5 * fmt.N):
        manager.PackedManager.find_longest_cache_hit([0] * (tokens // fmt.N), tokens - 1, [0], pool, spec)
        assert hit.hit(fmt, tokens, tokens) == found[-1] // fmt.N * fmt.N

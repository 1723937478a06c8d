"""`vllm-kvq calibrate MODEL --text FILE`: what it refuses before anything loads, and which tokens it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proof.models import named
from proof.models.architecture import Architecture
from proof.models.checkpoints import write_config
from proof.models.served import SERVED
from vllm_kvq import cli
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.cli.constants import _by_file, _hybrid
from vllm_kvq.eval.choice import choices
from vllm_kvq.integration.worker.calibration.text import FARTHEST, LEAST, MOST, PIECE, TOKENS, bundled, pieces, texts

LONG = "one two three four five six seven eight nine ten " * 200
FILES = {
    "empty.txt": b" \n",
    "binary.txt": b"\x7fELF\0\0" * 999,
    "latin.txt": "gr\u00fcn ".encode("latin-1") * 999,
    "short.txt": b"a few words",
    "long.txt": LONG.encode(),
}
REFUSED = {
    "--text nowhere.txt": "there is no file nowhere.txt; name a file of text",
    "--text .": ". is a folder; name a file, and repeat --text for more",
    "--text empty.txt": "empty.txt is empty; name a file of text",
    "--text binary.txt": "binary.txt is not text in UTF-8; convert it, or name another file",
    "--text latin.txt": "latin.txt is not text in UTF-8; convert it, or name another file",
    "--text short.txt": f"too few to fit constants to; give {LEAST:,} or more, with several --text",
    "--text long.txt --formats kitty2": "kitty2 has no constants that a server fits; there are klt2, klt3, klt4",
    "--text long.txt --formats klt3,oscar2": "oscar2 has no constants that a server fits; there are klt2, klt3, klt4",
    "--text long.txt --bits 4": "--bits is for choosing a format, and --text for a format's constants; leave out one",
    "--text long.txt --seed=1": "--seed is for choosing a format, and --text for a format's constants; leave out one",
    "--text long.txt --formats klt3,klt3:skip_layers=[0] --out o": "these have several; name fewer in --formats",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "small")


def refused(capsys: pytest.CaptureFixture[str], model: object, *more: str) -> str:
    with pytest.raises(SystemExit) as exited:
        cli.main(["calibrate", str(model), *more])
    said = capsys.readouterr()
    assert exited.value.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize("words", REFUSED)
def test_one_sentence(words: str, files: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert REFUSED[words] in refused(capsys, model, *words.split())


def test_too_few_tokens_are_counted(files: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Enough bytes, but not enough tokens; two files together have enough."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    word = max(tokenizer.get_vocab(), key=len)
    text, tokens = word * 300, len(tokenizer.encode(word * 300, add_special_tokens=False).ids)
    assert tokens < LEAST < len(text.encode())
    (files / "words.txt").write_text(text)
    assert f"the text has {tokens:,} tokens, too few" in refused(capsys, model, "--text", "words.txt")


def test_a_model_that_is_none(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder ./no; name a checkpoint's folder" in refused(capsys, "./no", "--text", "long.txt")
    assert "the folder . has no config.json that can be read" in refused(capsys, ".", "--text", "long.txt")


def test_hybrids(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(named("Qwen3-Next"), files / "model")
    capsys.readouterr()
    line = refused(capsys, "model", "--text", "long.txt")
    assert "constants are not fitted to hybrid models, as model is; use --kv-cache-dtype kitty2" in line


@pytest.mark.parametrize("architecture", SERVED, ids=lambda architecture: architecture.slug)
def test_a_hybrid_is_known_by_its_configuration(architecture: Architecture, tmp_path: Path) -> None:
    write_config(architecture, tmp_path)
    assert _hybrid(json.loads((tmp_path / "config.json").read_text())) == architecture.hybrid


def test_formats_of_the_same_layers_share_constants() -> None:
    chosen = choices("klt2,klt3,klt4,klt3:skip_layers=[0],klt2:W=64")
    alike = [[choice.label for choice in of_file] for of_file in _by_file(chosen).values()]
    assert alike == [["klt2", "klt3", "klt4", "klt2:W=64"], ["klt3:skip_layers=[0]"]]


def test_refusals_wait_for_no_package(files: Path, model: Path) -> None:
    code = (
        "import sys; from vllm_kvq import cli\n"
        f"try: cli.main(['calibrate', {str(model)!r}, '--text', 'long.txt', '--formats', 'kitty2'])\n"
        "except SystemExit: print({'vllm', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# -- which tokens -----------------------------------------------------------------------------------------------------
def numbers(text: str, add_special_tokens: bool = True) -> SimpleNamespace:
    """A tokenizer of texts that are numbers; it begins each text with -1."""
    return SimpleNamespace(input_ids=[-1] * add_special_tokens + [int(word) for word in text.split()])


def test_pieces_are_of_all_the_text() -> None:
    texts = [" ".join(map(str, range(30_000))), " ".join(map(str, range(30_000, 50_000)))]
    found = pieces(numbers, texts, 4096)
    assert found.tokens.shape == (MOST // PIECE, PIECE)
    assert (found.tokens[:, 0] == -1).all()
    assert (found.tokens[:, 2:] - found.tokens[:, 1:-1] == 1).all()
    begins = found.tokens[:, 1]
    assert begins[0] == 0
    assert begins[-1] + PIECE - 1 == 50_000
    steps = begins.diff()
    assert steps.max() - steps.min() <= 1
    assert steps.min() >= PIECE - 1
    assert found.start.min() == 0
    assert 0.9 * 4096 < found.positions.max() < 4096
    assert len(found.start.unique()) == len(found.start)
    assert pieces(numbers, texts, 1 << 20).positions.max() < FARTHEST


def test_short_texts_are_pieces_too() -> None:
    least = " ".join(map(str, range(LEAST)))
    assert pieces(numbers, [least], 4096).tokens.shape == (4, PIECE)
    assert pieces(numbers, [least], 100).tokens.shape == (10, 100)
    assert pieces(numbers, [least], 100).positions.max() < 100
    with pytest.raises(ValueError, match=f"the text has 900 tokens, too few to fit constants to; give {LEAST:,} or"):
        pieces(numbers, [" ".join(map(str, range(300)))] * 3, 4096)


@pytest.mark.parametrize("longest", [400, 4096, 1 << 20])
def test_bundled_pieces_have_room_in_the_model(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins as the tokenizer begins a text, and stands elsewhere; none beyond the model's last position."""
    assert len(texts()) == 12
    made_up = [" ".join(map(str, range(n, n + 500))) for n in range(12)]
    monkeypatch.setattr("vllm_kvq.integration.worker.calibration.text.texts", lambda: made_up)
    found = bundled(numbers, longest)
    assert found.tokens.shape == (12, TOKENS // 12)
    assert (found.tokens[:, 0] == -1).all()
    assert found.tokens[:, 1].tolist() == [*range(12)]
    assert found.start.min() == 0
    assert len(found.start.unique()) == 12
    last = min(longest, FARTHEST) - 1
    assert 0.9 * last < found.positions.max() <= last

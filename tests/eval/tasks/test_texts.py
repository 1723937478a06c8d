"""Texts: of several kinds, of the right length, and with nothing that is in two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.eval.tasks import texts
from vllm_kvq.eval.tasks.texts import KINDS, LENGTHS, Piece, Texts

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
PROSE = "Sentence number {i} of document {n} says something of its own.\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = random_model(tmp_path_factory.mktemp("model") / "random", hidden=64, layers=1, heads=1, kv_heads=1)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that are small, and the same everywhere."""

    def documents(kind: str) -> Any:
        for n in range(400):
            said = "".join(PROSE.format(i=i, n=f"{kind} {n}") for i in range(150))
            for piece in texts._pieces(f"{kind} {n}", said):
                yield Piece(piece.source, piece.text, "An answer." if kind == "chats" else "")

    monkeypatch.setattr(texts, "KINDS", {kind: (lambda kind=kind: documents(kind)) for kind in KINDS})
    texts.pieces.cache_clear()
    yield
    texts.pieces.cache_clear()


def test_nothing_is_given_out_twice(tokenizer: Any, made_up: None) -> None:
    maker = Texts(tokenizer, 0)
    said: set[str] = set()
    for number in range(6):
        for length in LENGTHS:
            text = maker.text(number, length)
            assert len(text.tokens) == length
            lines = [line for line in tokenizer.decode(text.tokens).split("\n")[1:-1] if len(line) > 20]
            assert lines
            assert not said.intersection(lines)
            said.update(lines)


def test_a_seed_is_a_choice_and_lengths_do_not_matter(tokenizer: Any, made_up: None) -> None:
    one, same, other = Texts(tokenizer, 0), Texts(tokenizer, 0), Texts(tokenizer, 1)
    first = one.text(4, 1024)
    same.text(0, 4096)
    assert same.text(4, 1024) == first
    assert other.text(4, 1024).sha != first.sha
    assert one.text(4, 1000).tokens == first.tokens[:1000]


def test_kinds_take_turns_and_chats_need_a_template(tokenizer: Any, made_up: None) -> None:
    own, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    try:
        chat = Texts(tokenizer, 0).text(3, 200)
        tokenizer.chat_template = None
        without = Texts(tokenizer, 0)
    finally:
        tokenizer.chat_template = own
    assert [without.text(i, 200).kind for i in range(4)] == ["prose", "documentation", "code", "prose"]
    assert chat.kind == "chats"
    assert tokenizer.decode(chat.tokens).startswith("<user>Sentence")


def test_it_ends_with_a_sentence_and_not_with_repetition(tokenizer: Any, made_up: None) -> None:
    with pytest.raises(ValueError, match="have too little prose for that many texts of 8192 tokens"):
        Texts(tokenizer, 0).text(4 * 400, 8192)


def test_what_is_installed_serves_24_texts(tokenizer: Any) -> None:
    """From what every installation has; the demo model was trained on none of it."""
    from vllm_kvq.eval.tasks.tasks import paragraphs

    maker = Texts(tokenizer, 0)
    learned = set(paragraphs())
    made = [maker.text(number, 1024) for number in range(24)]
    assert {text.kind for text in made} == {"prose", "documentation", "code", "chats"}
    assert len({text.sha for text in made}) == 24
    for text in made:
        assert text.sources
        assert not any(Path(source).parent == Path() for source in text.sources if text.kind == "code")
        assert not learned.intersection(tokenizer.decode(text.tokens).split("\n"))

"""The random models for tests, the trained demo model, and its tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from proof.demo import train as training
from proof.demo.corpus import SYSTEM_TEXT, load_corpus, parse_corpus
from proof.demo.model import wrong_tokens
from proof.demo.serve import ensure_demo_model
from proof.demo.train import chat_text, forward
from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.bench.checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS, LlamaShape
from vllm_kvq.bench.random_model import random_model
from vllm_kvq.bench.tokenizer import made_up_tokenizer
from vllm_kvq.formats.peers import PEERS

ROOT = Path(__file__).parent.parent


class Loaded:
    """A checkpoint read back from its files."""

    def __init__(self, path: Path):
        config = json.loads((path / "config.json").read_text())
        self.path = path
        self.weights = {n: w.float() for n, w in load_file(path / "model.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.shape = LlamaShape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return forward(self.shape, self.weights, ids)


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(random_model(tmp_path_factory.mktemp("random")))


@pytest.fixture(scope="module")
def demo() -> Loaded:
    """The model of `make run`, trained here if that has not been run yet."""
    return Loaded(ensure_demo_model(ROOT / ".demo" / "model"))


def random_ids(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(len(SPECIAL_TOKENS), 512, (rows, length), generator=generator)


def test_random_model_is_decisive(random: Loaded) -> None:
    top = random.logits(random_ids(4, 250)).topk(2)
    gap = top.values[..., 0] - top.values[..., 1]
    assert (gap < 1e-2).float().mean() < 0.01
    assert gap.mean() > 3
    assert top.indices[..., 0].min() >= len(SPECIAL_TOKENS), "greedy decoding must not end early"
    assert top.indices[..., 0].unique().numel() > 100


def test_random_model_reads_its_cache(random: Loaded) -> None:
    """Other tokens far back change most of the greedy choices: a wrong cache can't go unnoticed."""
    ids = random_ids(2, 250)
    altered = ids.clone()
    altered[:, :64] = ids[:, :64].flip(1)
    changed = random.logits(ids).argmax(-1) != random.logits(altered).argmax(-1)
    assert changed[:, 200:].float().mean() > 0.4


def test_random_model_is_reproducible(random: Loaded, tmp_path: Path) -> None:
    same, other = random_model(tmp_path / "same"), random_model(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (same / name).read_bytes() == (random.path / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (random.path / "model.safetensors").read_bytes()


def test_random_model_takes_every_size(tmp_path: Path) -> None:
    path = random_model(tmp_path, hidden=96, layers=3, heads=6, kv_heads=1, head_dim=80, vocab=1000, dtype="bfloat16")
    loaded = Loaded(path)
    assert loaded.logits(random_ids(1, 8)).shape == (1, 8, 1000)
    assert load_file(path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="do not divide"):
        random_model(tmp_path, heads=4, kv_heads=3)


def test_transformers_computes_the_same(random: Loaded) -> None:
    """The names, the rope and the head layout are those of HF's Llama, which vLLM loads."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(random.path, dtype=torch.float32)
    ids = random_ids(2, 100)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, random.logits(ids), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("vocab", [260, 512, 3000])
def test_made_up_tokenizer_reaches_every_token(vocab: int) -> None:
    tokenizer = made_up_tokenizer(vocab)
    assert tokenizer.get_vocab_size() == vocab
    letters = range(len(SPECIAL_TOKENS) + 256, vocab)
    assert [tokenizer.encode(tokenizer.decode([i])).ids for i in letters] == [[i] for i in letters]
    for text in ("Hello, world!", "Grüße 你好 \n\t 🙂", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("vocab", [100, 10**6])
def test_made_up_tokenizer_refuses_impossible_sizes(vocab: int) -> None:
    with pytest.raises(ValueError, match="vocab="):
        made_up_tokenizer(vocab)


def test_chat_template_is_what_training_used() -> None:
    jinja2 = pytest.importorskip("jinja2")
    rendered = jinja2.Template(CHAT_TEMPLATE).render(
        messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
        add_generation_prompt=True,
    )
    # A template drops one trailing newline, of the text around its blocks only; transformers keeps it.
    assert rendered.rstrip("\n") == chat_text("Q", "S").rstrip("\n")


def test_transformers_renders_the_template(random: Loaded) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(random.path)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == chat_text("Q", "S")


@pytest.mark.parametrize("text", ["Q: a?\n", "A: b\n", "Q: a?\nA: b\nA: c\n", "Q: a?\nA: b\nfree text\n"])
def test_malformed_corpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="corpus block"):
        parse_corpus(text)


@pytest.mark.slow
def test_demo_model_knows_every_answer(demo: Loaded) -> None:
    wrong = {e.questions[0]: wrong_tokens(demo.shape, demo.weights, demo.tokenizer, e) for e in load_corpus()}
    assert wrong[load_corpus()[0].questions[0]] == 0
    assert sum(wrong.values()) <= 5, wrong


@pytest.mark.slow
def test_demo_conversation_is_long_enough_to_read_packed_pages(demo: Loaded) -> None:
    entry = load_corpus()[0]
    assert len(demo.tokenizer.encode(chat_text(entry.questions[0], SYSTEM_TEXT)).ids) > 150
    assert 100 < len(demo.tokenizer.encode(entry.answer).ids) < 400
    assert demo.tokenizer.get_vocab_size() >= 512


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in PEERS])
def test_demo_answer_survives_every_format(demo: Loaded, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every key and value goes through the format, recent ones too: harder than a server makes it."""
    patch_attention(monkeypatch, lambda q, k, v: roundtrip(name, k, v, query=q))
    assert wrong_tokens(demo.shape, demo.weights, demo.tokenizer, load_corpus()[0]) == 0


@pytest.mark.slow
def test_demo_answer_is_lost_with_its_cache(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: zeros in place of all but the newest 64 tokens' cache must not go unnoticed."""
    patch_attention(monkeypatch, lambda q, k, v: (forget(k), forget(v)))
    assert wrong_tokens(demo.shape, demo.weights, demo.tokenizer, load_corpus()[0]) > 20


def forget(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:-64] = 0
    return x


def patch_attention(monkeypatch: pytest.MonkeyPatch, through) -> None:  # type: ignore[no-untyped-def]
    """Send the keys and values of `forward`'s attention through a function of (tokens, heads, head size)."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, **options):  # type: ignore[no-untyped-def]
        k2, v2 = through(*(x[0].transpose(0, 1) for x in (q, k, v)))
        return plain(q, k2.transpose(0, 1)[None].to(q), v2.transpose(0, 1)[None].to(q), **options)

    monkeypatch.setattr(training.F, "scaled_dot_product_attention", attention)

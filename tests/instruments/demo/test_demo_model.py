"""The random models for tests, the trained demo model, its tokenizers and its training."""

from __future__ import annotations

import hashlib
import json
import random as randomness
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from proof.demo import llama
from proof.demo.corpus import SYSTEM_TEXT, Entry, load_corpus, parse_corpus
from proof.demo.llama import Watch, forward, shape_of
from proof.demo.model import SHAPE
from proof.demo.texts import MIXTURE, WEIGHTS, Batches, chat_text, conversation, encode, targets
from proof.demo.train import FREE_PAIRS, Phase, Plan, Training
from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.bench.models.checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.bench.models.tokenizer import made_up_tokenizer
from vllm_kvq.eval.demo import DEMO, demo_model
from vllm_kvq.eval.peers import PEERS
from vllm_kvq.eval.tasks.tasks import TASKS, hidden

ROOT = Path(__file__).parents[3]


class Loaded:
    """A checkpoint read back from its files."""

    def __init__(self, path: Path):
        config = json.loads((path / "config.json").read_text())
        self.path = path
        self.weights = {n: w.float() for n, w in load_file(path / "model.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.shape = shape_of(config)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return forward(self.shape, self.weights, ids)[0]

    def wrong_tokens(self, entry: Entry) -> int:
        """Tokens of the answer that greedy decoding would get wrong, asked as in training (0: recited)."""
        prompt = self.tokenizer.encode(chat_text(entry.questions[0], SYSTEM_TEXT), add_special_tokens=False).ids
        answer = self.tokenizer.encode(f"{entry.answer}<eos>", add_special_tokens=False).ids
        logits = self.logits(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
        return int((logits.argmax(-1) != torch.tensor(answer)).sum())


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(random_model(tmp_path_factory.mktemp("random")))


@pytest.fixture(scope="module")
def demo() -> Loaded:
    return Loaded(demo_model())


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
    # A template drops one trailing newline, but only of the text around its blocks; transformers keeps it.
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


# -- the demo model --------------------------------------------------------------------------------------------------
def test_the_weights_are_those_that_are_told() -> None:
    weights = (DEMO / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() in (DEMO / "README.md").read_text()
    assert len(weights) < 25 << 20


def test_demo_model_has_the_shape_that_is_trained(demo: Loaded) -> None:
    assert demo.shape == SHAPE
    half = SHAPE.head_dim // 2
    for i in range(SHAPE.layers):
        pairs = demo.weights[f"model.layers.{i}.self_attn.q_proj.weight"].view(SHAPE.heads, 2, half, SHAPE.hidden)
        free = (pairs == 0).all(dim=(0, 1, 3))
        assert free.nonzero().flatten().tolist() == list(range(half - FREE_PAIRS, half))


@pytest.mark.slow
def test_demo_model_knows_every_answer(demo: Loaded) -> None:
    wrong = {e.questions[0]: demo.wrong_tokens(e) for e in load_corpus()}
    assert wrong[load_corpus()[0].questions[0]] == 0
    assert sum(wrong.values()) <= 5, wrong


def recalled(demo: Loaded, characters: int, texts: int = 4) -> float:
    """The share of answers that are right."""
    right = []
    for seed in range(texts):
        sample = TASKS["recall"].sample(randomness.Random(seed), characters)
        encoding = encode(demo.tokenizer, sample.text)
        weights, _ = targets(sample, encoding.offsets)
        asked = torch.tensor([i for i, w in enumerate(weights) if w >= 1])
        said = demo.logits(torch.tensor([encoding.ids]))[0, asked - 1].argmax(-1)
        right.append((said == torch.tensor(encoding.ids)[asked]).float().mean())
    return float(torch.stack(right).mean())


@pytest.mark.slow
def test_demo_model_recalls(demo: Loaded) -> None:
    """Within 2,000 tokens."""
    assert recalled(demo, 7200) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if n not in PEERS and not f.keys.calibrated])
def test_demo_model_recalls_from_every_format(demo: Loaded, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every key and value goes through the format, recent ones too: harder than a server makes it."""
    patch_attention(monkeypatch, lambda q, k, v: roundtrip(name, k, v, query=q))
    assert recalled(demo, 2000) >= 0.8


@pytest.mark.slow
def test_recall_is_lost_with_the_cache(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: zeros in place of the cache of all but the newest 64 tokens must be noticed."""
    patch_attention(monkeypatch, lambda q, k, v: (forget(k), forget(v)))
    assert recalled(demo, 2000) < 0.1


def forget(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:-64] = 0
    return x


def patch_attention(monkeypatch: pytest.MonkeyPatch, through) -> None:  # type: ignore[no-untyped-def]
    """Send the keys and values of `forward`'s attention through a function of (tokens, heads, head size)."""
    plain = llama._attend

    def attention(q, k, v):  # type: ignore[no-untyped-def]
        k2, v2 = through(*(x[0].transpose(0, 1) for x in (q, k, v)))
        return plain(q, k2.transpose(0, 1)[None].to(q), v2.transpose(0, 1)[None].to(q))

    monkeypatch.setattr(llama, "_attend", attention)


# -- how it is trained -----------------------------------------------------------------------------------------------
def test_both_attentions_are_the_same(random: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel for long rows, the formula for short ones; and the weights that are recorded are those used."""
    ids = random_ids(2, 100)
    short = random.logits(ids)
    monkeypatch.setattr(llama, "SHORT", 50)
    torch.testing.assert_close(random.logits(ids), short, rtol=1e-4, atol=1e-3)
    watch = (Watch(0, (1, 0)), Watch(1, (3,)))
    _, (first, second) = forward(random.shape, random.weights, ids, watch=watch)
    assert first.shape == (2, 2, 100, 100)
    assert second.shape == (2, 1, 100, 100)
    torch.testing.assert_close(first.exp().sum(-1), torch.ones(2, 2, 100))
    assert (first.exp().triu(1) == 0).all()


def test_what_is_asked_is_a_target_and_linked(demo: Loaded) -> None:
    for name, make in {name: task.make for name, task in TASKS.items()}.items():
        sample = make(randomness.Random(1), 2000)
        encoding = encode(demo.tokenizer, sample.text)
        weights, links = targets(sample, encoding.offsets)
        bar = 1 if sample.answers else 0.5
        said = demo.tokenizer.decode([t for t, w in zip(encoding.ids, weights, strict=True) if w >= bar])
        wanted = "".join(sample.text[a.start : a.end] for a in sample.answers) if sample.answers else sample.text
        assert said == wanted, name
        assert all(encoding.ids[t + 1] == encoding.ids[s] and s <= t for t, s in links), name
        if name in ("recall", "needle", "copy", "repeat"):
            # text that is cut into other tokens at its first place can't be linked
            assert len(links) >= 0.95 * sum(w >= 1 for w in weights), name


def test_a_conversation_is_a_chat(demo: Loaded) -> None:
    sample = conversation(hidden("needle", 1))(randomness.Random(2), 600)
    (answer,) = sample.answers
    assert sample.text.startswith("<bos><turn>user\n")
    assert sample.text[: answer.start].endswith("<eos><turn>assistant\n")
    said = sample.text[answer.start : answer.end].removesuffix("<eos>")
    assert answer.source is not None
    assert sample.text[answer.source :].startswith(said)
    ids = encode(demo.tokenizer, sample.text).ids
    assert (ids[0], ids[-1]) == (0, 1)
    assert ids.count(0) == 1


def test_batches_are_full_and_reproducible(demo: Loaded) -> None:
    batches = Batches(demo.tokenizer, 5)
    first, again, other = (batches(i, 4, 256) for i in (3, 3, 4))
    assert first.ids.shape == first.weights.shape == (4, 257)
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.links, again.links)
    assert not torch.equal(first.ids, other.ids)
    assert {0.0, 0.5, 1.0} <= set(first.weights.unique().tolist()) <= {0.0, *torch.tensor([*WEIGHTS.values()]).tolist()}
    r, t, s = first.links.unbind(1)
    assert torch.equal(first.ids[r, t + 1], first.ids[r, s])
    assert sum(share for share, _ in MIXTURE) == pytest.approx(1)


TINY = Plan((Phase(4, 32, 64, (1.0, 0.0)), Phase(4, 48, 96)), warm_up=2)


def tiny(demo: Loaded) -> Training:
    shape = replace(SHAPE, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=32)
    return Training(shape, demo.tokenizer, TINY)


def test_training_resumes_where_it_was(demo: Loaded, tmp_path: Path) -> None:
    whole, begun, resumed = (tiny(demo) for _ in range(3))
    found = list(whole.run(8))
    assert [f["length"] for f in found] == [32] * 4 + [48] * 4
    assert ["help" in f for f in found] == [True] * 4 + [False] * 4
    list(begun.run(5))
    begun.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    assert list(resumed.run(8)) == found[5:]
    for name, w in whole.weights.items():
        assert torch.equal(w, resumed.weights[name]), name
    free = whole.weights["model.layers.1.self_attn.q_proj.weight"].view(4, 2, 8, 32)[:, :, 8 - FREE_PAIRS :]
    assert (free == 0).all()
    other = Training(whole.shape, demo.tokenizer, replace(TINY, seed=1))
    with pytest.raises(ValueError, match="another plan"):
        other.load(tmp_path / "state")


def test_help_teaches_where_to_look(demo: Loaded) -> None:
    """Its loss falls within a few steps, and attention that looks at the right place has none."""
    training = tiny(demo)
    training.plan = Plan((Phase(60, 32, 256, (1.0, 1.0)),), warm_up=1)
    found = [f["help"] for f in training.run(60)]
    assert sum(found[-9:]) < 0.8 * sum(found[:9])


def test_a_plan(demo: Loaded) -> None:
    assert [TINY.at(i)[1] for i in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert TINY.rate_at(0) == 0.5
    assert TINY.rate_at(3) == 1
    assert 0 < TINY.rate_at(7) < 1
    with pytest.raises(IndexError):
        TINY.at(8)
    with pytest.raises(ValueError, match="at least one row"):
        Phase(1, 64, 32)

"""Reading: each query sees what a decode step would see, and the model computes what the real one does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_each import METHODS
from plans import plan

from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.heads.capture import Layer
from vllm_kvq.eval.reading import reader as reader_module
from vllm_kvq.eval.reading.attention import Packed, Scores, attend
from vllm_kvq.eval.reading.caches import cache_of, fp8
from vllm_kvq.eval.reading.reader import Reader, Reads, Unreadable, refuse
from vllm_kvq.eval.results.result import READING, Results
from vllm_kvq.eval.run import reading as reading_run
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.harness import Run
from vllm_kvq.eval.run.rows import rows
from vllm_kvq.eval.run.store import Store, reading_sources
from vllm_kvq.formats import FORMATS, Geometry

HEADS, GROUP, SIZE, TOKENS, NEW = 2, 3, 16, 230, 103
SMALL = {"tasks": ("text",), "contexts": (192,), "count": 3, "regimes": (READING,)}


# -- attention --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unit", [32, 128])
@pytest.mark.parametrize(
    "scores", [Scores(0.3), Scores(0.3, cap=2.0), Scores(0.3, window=50)], ids=["plain", "cap", "window"]
)
def test_each_query_reads_what_a_decode_step_would(unit: int, scores: Scores) -> None:
    """Written out token by token."""
    torch.manual_seed(0)
    query = torch.randn(HEADS * GROUP, NEW, SIZE)
    key, value, key_hat, value_hat = torch.randn(4, HEADS, TOKENS, SIZE)
    packed = Packed(key_hat, value_hat, 5, unit, 64 if unit == 32 else 0, 0)
    found = attend(query, key, value, scores, packed)
    for i in range(NEW):
        t = TOKENS - NEW + i
        keys, values = key[:, : t + 1].clone(), value[:, : t + 1].clone()
        for exact, read, window in ((keys, key_hat, packed.key_window), (values, value_hat, packed.window)):
            end = (t - window) // unit * unit
            exact[:, 5 : max(5, end)] = read[:, 5 : max(5, end)]
        for head in range(HEADS * GROUP):
            s = keys[head // GROUP] @ query[head, i] * scores.scale
            if scores.cap:
                s = scores.cap * (s / scores.cap).tanh()
            if scores.window:
                s[: max(0, t + 1 - scores.window)] = -torch.inf
            assert torch.allclose(found[head, i], s.softmax(0) @ values[head // GROUP], atol=1e-5), (head, i)


def test_pages_have_both_windows() -> None:
    """What `attend` is told of a format: keys may be read from pages earlier than values."""
    page = FORMATS["lossless"].bind(Geometry(64, 128, torch.float32), {"W": 64, "W_keys": 0, "S": 4})
    packed = Packed.of(page, *torch.zeros(2, 256, 1, 64))
    assert (packed.sinks, packed.unit) == (4, 32)
    assert packed.ends(200) == (192, 128)


def test_fp8_is_e4m3() -> None:
    """Three bits after the leading one; what is too large becomes its largest number, not NaN."""
    x = torch.tensor([1.1, 447.0, 1e4, -1e4])[:, None, None]
    reads = fp8(Layer(0, x, x, x, 1.0), x, -x)
    assert reads.key.flatten().tolist() == [1.125, 448, 448, -448]
    assert reads.value.flatten().tolist() == [-1.125, -448, -448, 448]
    assert reads.packed is None


# -- models -----------------------------------------------------------------------------------------------------------
def tiny(folder: Path, kind: str, **more: Any) -> Path:
    """A random model of another family."""
    import transformers

    sizes: dict[str, Any] = {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{
            "head_dim": 64,
            "intermediate_size": 96,
            "vocab_size": 300,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
        },
    }
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **more})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 40},
    "gemma3_text": {
        "query_pre_attn_scalar": 64,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_exact_cache_gives_the_models_own_logits(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = tiny(tmp_path / kind, kind, **MODELS[kind])
    tokens = tuple(torch.randint(300, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    theirs = own(torch.tensor([tokens])).logits[0].detach()
    reader = Reader(folder, "float32")
    past = reader.before(tokens[:100])
    assert past.captured.windows == ((0,) if kind.startswith("gemma") else ())
    assert (reader.logits(past, tokens[100:], None) - theirs[100:]).abs().max() < 1e-4 * theirs.std()
    for name, same in (("lossless", True), ("kivi2", False)):
        found = reader.logits(past, tokens[100:], cache_of(Choice(name), past))
        assert torch.equal(found, reader.logits(past, tokens[100:], None)) is same


def test_rope_is_what_the_model_does(tmp_path: Path) -> None:
    """Rotated halves in Llama, interleaved pairs in Cohere; both as vLLM names them."""
    for kind, pairing in (("llama", "half"), ("cohere", "interleaved")):
        reader = Reader(tiny(tmp_path / kind, kind), "float32")
        captured = reader.before(tuple(range(64))).captured
        assert (captured.pairing, captured.rotary_dim) == (pairing, 64)
        assert captured.rope is not None


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"kv_lora_rank": 16}, "caches latents"),
        ({"num_kv_shared_layers": 1}, "read another layer's cache"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of kind linear_attention"),
    ],
)
def test_what_it_can_not_measure_is_refused_in_a_sentence(more: dict[str, Any], sentence: str) -> None:
    class Config:
        model_type = "made_up"

        def get_text_config(self) -> Any:
            return self

    config = Config()
    vars(config).update(more)
    with pytest.raises(Unreadable, match=sentence):
        refuse(config)


def test_keys_and_values_are_rounded_as_in_the_cache(tmp_path: Path) -> None:
    """To the checkpoint's dtype, including those of the tokens that read."""
    folder = tiny(tmp_path / "llama", "llama")
    tokens = tuple(range(100))
    whole, rounded = (Reader(folder, dtype) for dtype in ("float32", "bfloat16"))
    past = rounded.before(tokens[:80])
    assert {x.dtype for layer in past.layers.values() for x in (layer.query, layer.key, layer.value)} == {
        torch.bfloat16
    }
    seen: list[torch.Tensor] = []

    def exact(layer: Layer, key: torch.Tensor, value: torch.Tensor) -> Reads:
        seen.extend((key, value))
        return Reads(key, value)

    found = rounded.logits(past, tokens[80:], exact)
    assert len(seen) == 4
    assert all(torch.equal(x.bfloat16().float(), x) for x in seen)
    assert not torch.equal(found, whole.logits(whole.before(tokens[:80]), tokens[80:], None))


def test_attention_that_is_not_the_models_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its logits; and layers that do not go through ours are counted."""
    folder = tiny(tmp_path / "llama", "llama")
    reader = Reader(folder, "float32")
    attention = reader.model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"
    with pytest.raises(Unreadable, match="attention of 1 of this model's 2 layers goes through"):
        reader._check()
    monkeypatch.setattr(reader_module, "attend", lambda query, *more: 1.01 * attend(query, *more))
    with pytest.raises(Unreadable, match="logits differ from the model's own"):
        Reader(folder, "float32")


def test_attention_that_does_more_is_noticed(tmp_path: Path) -> None:
    """Learned sinks, which our attention does not support."""
    with pytest.raises(Unreadable, match="has learned sinks"):
        Reader(tiny(tmp_path / "oss", "gpt_oss", num_local_experts=2, num_experts_per_tok=1), "float32")


# -- runs -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "random", hidden=64, layers=2, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def no_dry_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_kvq.eval.run.harness.bits_without_engine", lambda *about: 3.0)


def test_a_run_that_was_stopped_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = plan(model, "kivi2,squat2", **SMALL)
    figures = 0

    def count(text: str, more: int) -> None:
        nonlocal figures
        figures += more
        if figures == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(todo, Store(tmp_path), count).go()
    passes: list[Any] = []
    monkeypatch.setattr(
        reading_run, "cache_of", lambda choice, past: passes.append(choice.label) or cache_of(choice, past)
    )
    run = Run(todo, Store(tmp_path), lambda text, more: None)
    run.go()
    # five of nine figures are there, and the sixth to be asked for belongs to the second text
    assert len(passes) == 3
    found = {row.format: row for row in rows(run)}
    assert found["auto"].metrics["kl"].value == 0
    assert found["kivi2"].metrics["kl"].value > 0
    assert found["kivi2"].bits == 3.0
    assert [text.tokens for text in found["kivi2"].texts] == [96] * 3
    # the last half of each text
    assert sum(b.count for b in found["kivi2"].by_position["kl"]) == 3 * 96
    assert min(b.begin for b in found["kivi2"].by_position["kl"]) == 96
    saved = Results(rows(run))
    saved.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == saved


def test_a_format_that_can_not_be_had_is_a_row_with_the_reason(model: Path, tmp_path: Path) -> None:
    run = Run(plan(model, "squat2:r=64,kivi2", **SMALL), Store(tmp_path), lambda text, more: None)
    run.go()
    problems = {row.format: row.problem for row in rows(run)}
    assert "a subspace of" in str(problems["squat2"])
    assert problems["kivi2"] is None


def test_a_percentile_is_there_where_enough_tokens_lie_beyond_it(model: Path, tmp_path: Path) -> None:
    for count, there in ((3, False), (11, True)):
        run = Run(plan(model, "kivi2", **{**SMALL, "count": count}), Store(tmp_path), lambda text, more: None)
        run.go()
        assert all(("kl_p90" in row.metrics) is there for row in rows(run))


def test_figures_belong_to_the_number_of_readers(model: Path) -> None:
    few, many = (plan(model, "kivi2", **SMALL, readers=n) for n in (16, 64))
    (item, *_) = few.sequences
    assert few.key(REFERENCE, item, READING) != many.key(REFERENCE, item, READING)


def test_figures_belong_to_a_formats_own_sources() -> None:
    keys = {name: reading_sources(name, {}) for name in METHODS}
    assert len({*keys.values()}) == len(METHODS)
    assert reading_sources("kivi2", {"W": 64}) == keys["kivi2"]


def test_the_reference_is_measured_as_all_others_are(model: Path) -> None:
    torch.manual_seed(0)
    exact, found = (torch.randn(70, 40).log_softmax(-1) for _ in range(2))
    figures = reading_run.compared(exact, found, tuple(range(40)) + tuple(range(30)))
    expected = torch.nn.functional.kl_div(found, exact, reduction="none", log_target=True).sum(1)
    assert figures["kl"] == pytest.approx(expected.numpy(), rel=1e-5)
    for name, x in (("chosen", found), ("chosen_plain", exact)):
        assert np.array_equal(figures[name], x.numpy()[np.arange(70), figures["token"]])
    best = found.argmax(-1).numpy()
    assert np.array_equal(figures["hit"], best == figures["token"])
    assert np.array_equal(figures["same"], best == exact.argmax(-1).numpy())
    assert 0 < figures["hit"].sum() < 70
    assert reading_run.compared(found, found, tuple(range(40)) + tuple(range(30)))["same"].all()
    assert REFERENCE.label == "auto"

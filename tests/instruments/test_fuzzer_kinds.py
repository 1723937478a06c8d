"""The kinds of models that the fuzzer's engines have, and what it draws for each."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proof.fuzz.attempt import checkpoint_of
from proof.fuzz.case import Case, Setup, mend
from proof.fuzz.draw import MANY, MOST, WORDS_OF_COPIES, Drawer, draw_setup
from proof.fuzz.kinds import MODELS, draw_model, judged, kind
from proof.fuzz.main import main
from proof.fuzz.shrink import Shrinker
from proof.models.copies import COPIES, copy
from proof.models.seeing import SEEING
from proof.oracle.adapters import ADAPTERS
from proof.oracle.trace import Request, Trace
from proof.weights.folder import VARIABLE

LORA, SEES = "Llama with LoRA", next(iter(SEEING))
QWEN = {"model_type": "qwen2", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}
SMOLLM = {"model_type": "llama", "hidden_size": 1152, "num_attention_heads": 9, "num_key_value_heads": 3}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1}
WINDOWS = [*["sliding_attention"] * 5, "full_attention"] * 3
FULL = ["full_attention"] * 18


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """real(name, the numbers in its config.json)"""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    copy.cache_clear()

    def write(name: str, **numbers: Any) -> None:
        (tmp_path / name).mkdir()
        common = {"architectures": ["X"], "vocab_size": 1000, "num_hidden_layers": 18, "intermediate_size": 4096}
        (tmp_path / name / "config.json").write_text(json.dumps({**common, **numbers}))

    return write


def test_a_copy_without_a_head_size(real: Callable[..., None]) -> None:
    """One KV head and its query heads: their size follows from that of the hidden states."""
    real("qwen2.5-1.5b", **QWEN, rope_theta=7.0, layer_types=FULL)
    made = copy("copy of qwen2.5-1.5b").build()
    assert type(made).__name__ == "Qwen2Config"
    assert (made.num_attention_heads, made.num_key_value_heads, made.hidden_size) == (6, 1, 768)
    assert (made.num_hidden_layers, made.vocab_size, made.rope_parameters["rope_theta"]) == (2, 1000, 7.0)
    assert kind("copy of qwen2.5-1.5b").head_size == 128


def test_a_copy_with_a_head_size(real: Callable[..., None]) -> None:
    """All heads; the size of the hidden states is a multiple of their number, and of 64."""
    real("smollm2-135m", **SMOLLM, head_dim=64)
    made = copy("copy of smollm2-135m").build()
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim, made.hidden_size) == (9, 3, 64, 576)


def test_a_copy_with_windows(real: Callable[..., None]) -> None:
    real("gemma-3-270m", **GEMMA, head_dim=256, layer_types=WINDOWS, sliding_window=512)
    made = copy("copy of gemma-3-270m")
    assert made.windows
    assert made.text().layer_types == WINDOWS[:6]
    assert (made.text().sliding_window, made.text().num_attention_heads, made.head_size) == (48, 4, 256)


def test_a_copy_has_the_real_tokenizer(real: Callable[..., None], tmp_path: Path) -> None:
    real("qwen2.5-1.5b", **QWEN)
    (tmp_path / "llama").mkdir()
    for name in ("qwen2.5-1.5b", "llama"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).write_text(name)
    for model, whose in (("copy of qwen2.5-1.5b", "qwen2.5-1.5b"), ("Phi-2", "llama")):
        path = Path(checkpoint_of(Setup("squat2", model=model), str(tmp_path / "llama")))
        assert (path / "model.safetensors").exists()
        assert (path / "tokenizer.json").read_text() == whose


def test_copies_need_the_real_models(real: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--copies"])
    assert "python -m proof weights" in capsys.readouterr().err
    with pytest.raises(ValueError, match="smollm2-135m is not there"):
        Setup("squat2", model="copy of smollm2-135m")


def test_each_group_of_models_is_drawn_as_often(real: Callable[..., None]) -> None:
    for name in COPIES.values():
        windows = {"head_dim": 256, "layer_types": WINDOWS, "sliding_window": 512}
        real(name, **GEMMA, **windows) if name.startswith("gemma") else real(name, **QWEN)
    models = [*judged(MODELS, "lossless"), *COPIES]
    drawn = [draw_model(Random(i), models) for i in range(500)]
    for some in (
        [*COPIES],
        [LORA, *SEEING],
        [m for m in MODELS if kind(m).hybrid],
        [m for m in MODELS if kind(m).windows],
    ):
        assert 60 < sum(name in some for name in drawn) < 140
    for name in (LORA, *SEEING):
        assert 20 < drawn.count(name) < 50
    assert {LORA, *SEEING} <= {*judged(MODELS, "klt3")}


def drawn(model: str, traces: int = 12, **changes: Any) -> list[Request]:
    drawer = Drawer(Random(5), replace(draw_setup(Random(6), "squat2", "V1", model), **changes))
    found = [drawer.trace(f"t{i}", reset=i == 0) for i in range(traces)]
    Case(drawer.setup, tuple(found))  # which accepts them
    return [r for trace in found for r in trace.requests]


def test_words_of_copies_are_drawn(real: Callable[..., None]) -> None:
    real("qwen2.5-1.5b", **QWEN, vocab_size=WORDS_OF_COPIES.stop)
    words = {word for r in drawn("copy of qwen2.5-1.5b") for word in (*r.prompt, *r.stop_token_ids)}
    assert words <= {*WORDS_OF_COPIES}
    assert max(words) > WORDS_OF_COPIES.stop // 2


def test_adapters_are_drawn() -> None:
    assert {r.adapter for r in drawn(LORA)} == {*range(ADAPTERS + 1)}
    assert {r.adapter for r in drawn("Llama")} == {0}


def test_adapters_have_no_drafts_with_the_v2_runner() -> None:
    """It crashes on them."""
    assert {draw_setup(Random(i), "squat2", "V2", LORA).drafts for i in range(20)} == {0}
    assert {draw_setup(Random(i), "squat2", "V1", LORA).drafts for i in range(20)} == {*range(6)}
    with pytest.raises(ValueError, match="drafts of models with adapters"):
        Setup("squat2", model=LORA, drafts=1, runner="V2")


def test_pictures_are_drawn() -> None:
    requests = drawn(SEES)
    assert {len(r.pictures) for r in requests} == {0, 1, 2}
    # the same picture in the same place, and another one
    places = {(p.at, p.seed) for r in requests for p in r.pictures}
    assert len({at for at, _ in places}) < len(places)
    # words between any two
    assert all(a.at + a.tokens < b.at for r in requests for a, b in pairwise(r.pictures))
    assert not any(r.letters for r in requests)


def test_letters_are_drawn() -> None:
    held = [r.letters for r in drawn("Llama") if r.letters]
    assert held
    assert all(set(letters) <= set(string.ascii_lowercase) for letters in held)


def test_several_samples_are_drawn_where_the_reference_can_judge_them() -> None:
    setup = Setup("lossless")
    for model, expected in (("Llama", {1, 2, 3}), ("GLM-4", {1})):
        drawer = Drawer(Random(5), replace(setup, model=model))
        assert {r.n for i in range(20) for r in drawer.trace(f"t{i}", reset=False).requests} == expected


def test_many_requests_are_drawn() -> None:
    setups = [draw_setup(Random(i), "squat2", "V1") for i in range(40)]
    assert MANY in {setup.max_seqs for setup in setups}
    assert MANY not in {draw_setup(Random(i), "squat2", "V2").max_seqs for i in range(40)}
    for most, expected in ((MANY, MOST), (16, 24)):
        drawer = Drawer(Random(5), replace(setups[0], max_seqs=most))
        assert max(len(drawer.trace(f"t{i}", reset=False).requests) for i in range(20)) == expected


@pytest.mark.parametrize(("model", "mended"), [(LORA, True), ("Granite 4", True), ("Llama", False)])
def test_plain_vllm_is_mended(model: str, mended: bool) -> None:
    """For the models that it serves wrongly on a CPU."""
    assert (Setup("lossless", model=model).plain().arguments().get("before") is mend) == mended


def case_of(model: str, **fields: Any) -> Case:
    return Case(Setup("squat2", model=model), (Trace((Request("r", (10, 11), 3, **fields),), True),))


@pytest.mark.parametrize(
    ("model", "fields", "complaint"),
    [
        ("Llama", {"adapter": 1}, "adapter 1, which the model does not have"),
        (LORA, {"adapter": ADAPTERS + 1}, "adapter 3, which"),
        (LORA, {"adapter": -1}, "adapter is -1"),
        ("Llama", {"letters": "a]"}, "letters is"),
        ("Llama", {"letters": 3}, "letters is 3"),
        (SEES, {"letters": "a"}, "has letters, which are not asked of models with images"),
        ("Llama", {"stop_token_ids": (9, 512)}, "stops at a token that the model does not know"),
    ],
)
def test_cases_that_no_model_can_run(model: str, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        case_of(model, **fields)


@pytest.mark.parametrize(("model", "fields"), [(LORA, {"adapter": 2, "letters": "abc"}), ("Llama", {})])
def test_json(model: str, fields: dict[str, Any]) -> None:
    case = case_of(model, **fields)
    data = json.loads(json.dumps(case.to_json()))
    assert Case.from_json(data) == case
    assert {*fields} == {*data["traces"][0]["requests"][0]} - {"name", "prompt", "max_tokens"}


def test_pictures_of_a_case() -> None:
    prompt, pictures = SEEING[SEES].prompt([(10, 11), 1, (12,)])
    request = Request("r", prompt, 3, pictures=pictures)
    Case(Setup("squat2", model=SEES), (Trace((request,), True),))
    with pytest.raises(ValueError, match="only LLaVA with images, Qwen2-VL with images see them"):
        Case(Setup("squat2"), (Trace((request,), True),))
    shorter = replace(request, prompt=(10, prompt[2]), pictures=(replace(pictures[0], at=1, tokens=1),))
    for wrong in (replace(request, pictures=()), shorter):
        with pytest.raises(ValueError, match="only pictures have it"):
            Case(Setup("squat2", model=SEES), (Trace((wrong,), True),))


@pytest.mark.parametrize(("model", "needed"), [(LORA, {"adapter": 2}), ("Llama", {"letters": "abc"})])
def test_what_a_failure_needs_stays(model: str, needed: dict[str, Any]) -> None:
    """And only that; a plainer model does not have what the requests need."""
    small = Request("r", (10, 11), 1, **needed)
    fails = lambda case: needed.items() <= vars(case.traces[0].requests[0]).items()  # noqa: E731
    found = Shrinker(case_of(LORA, adapter=2, letters="abc"), fails, lambda: False).run()
    assert found == Case(Setup("squat2", model=model), (Trace((small,), True),))


def test_pictures_stay_whole_or_go() -> None:
    prompt, pictures = SEEING[SEES].prompt([(10,) * 20, 1, (12,) * 20])
    request = Request("r", prompt, 1, pictures=pictures)
    case = Case(Setup("squat2", model=SEES), (Trace((request,), True),))
    needed = Shrinker(case, lambda case: bool(case.traces[0].requests[0].pictures), lambda: False).run()
    assert needed == case
    small = Shrinker(case, lambda _: True, lambda: False).run()
    assert small.setup == Setup("squat2")
    assert {*small.traces[0].requests[0].prompt} <= {10, 12}
    assert len(small.traces[0].requests[0].prompt) < 8

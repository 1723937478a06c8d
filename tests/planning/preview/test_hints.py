"""Known failures with a model are reported before it is served: in check's document and text, and in the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_kvq import cli
from vllm_kvq.bench.models.checkpoint import LlamaShape, save_checkpoint
from vllm_kvq.bench.models.tokenizer import made_up_tokenizer
from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.advice import hints, key_biases
from vllm_kvq.integration.plan import memory
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.integration.worker import report

pytestmark = pytest.mark.engine
Made = Callable[..., Path]

BIASED = LlamaShape(hidden=128, layers=8, heads=2, kv_heads=2, intermediate=64, vocab=260, attention_bias=True)
SMALL, LARGE = 8.0, 90.0
"""Norms of a head's bias: what most layers of Qwen2.5-Coder-0.5B have, and what few have."""
HURT = "because it gives 32 channels of a token one scale, which a wide constant channel uses up; use kitty2"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """made({layer: norm of the second KV head's bias}) -> a checkpoint; other heads' biases are small."""

    def make(norms: Mapping[int, float], shape: LlamaShape = BIASED) -> Path:
        weights = {name: torch.zeros(size) for name, size in shape.parameters()}
        for layer in range(shape.layers if shape.attention_bias else 0):
            bias = torch.zeros(2, 64)
            bias[:, 3], bias[1, 3] = SMALL, norms.get(layer, SMALL)
            weights[f"model.layers.{layer}.self_attn.k_proj.bias"] = bias.flatten()
        save_checkpoint(tmp_path / "made", shape, weights, made_up_tokenizer(shape.vocab), torch.bfloat16)
        return tmp_path / "made"

    return make


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The document of a check, which says the same in its text."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr("vllm_kvq.cli.check.one.be_quiet", lambda: None)
    memory._problem.cache_clear()

    def go(model: Path, name: str, **options: Any) -> dict[str, Any]:
        arguments = ["check", str(model), "--kv-cache-dtype", name, "--max-model-len", "2048"]
        arguments += ["--additional-config", json.dumps({"kvq": options})]
        assert cli.main([*arguments, "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert ("warning" in text) == bool(document["warnings"])
        assert all(sentence in text for sentence in document["warnings"])
        return document

    return go


def test_check_warns_and_says_yes(made: Made, checked: Callable[..., dict[str, Any]]) -> None:
    model = made({0: LARGE, 5: 3 * LARGE})
    found = checked(model, "innerq2")
    assert found["starts"]
    assert found["warnings"] == [
        "this model's key biases are large in layers 0 and 5 (norm up to 270), and innerq2 is known to fail there, "
        f"{HURT}, or keep these layers in 16 bits with the kvq option 'skip_layers': [0, 5]"
    ]
    # following the advice silences the warning; following half of it does not
    assert checked(model, "innerq2", skip_layers=[0, 5])["warnings"] == []
    (sentence,) = checked(model, "innerq2", skip_layers=[0])["warnings"]
    assert "large in layer 5 (" in sentence
    assert sentence.endswith("[0, 5]")
    assert checked(model, "squat2")["warnings"] == []
    # another codec under the same name, and the same codec under another one
    assert checked(model, "innerq2", keys="kivi")["warnings"] == []
    assert checked(model, "squat2", keys="innerq")["warnings"] != []


def test_large_in_many_layers(made: Made, checked: Callable[..., dict[str, Any]]) -> None:
    """Not packing layers is not a way out in that case."""
    (sentence,) = checked(made(dict.fromkeys(range(3), LARGE)), "qjl3")["warnings"]
    assert sentence.endswith("its constant part included; use kitty2")


@pytest.mark.parametrize("biased", [True, False])
def test_nothing_to_say(biased: bool, made: Made, checked: Callable[..., dict[str, Any]]) -> None:
    shape = LlamaShape(**{**vars(BIASED), "attention_bias": biased})
    assert checked(made({}, shape), "innerq2")["warnings"] == []


def test_the_log_has_it(made: Made, bare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(report.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr("vllm.distributed.parallel_state.is_global_first_rank", lambda: True)
    config = bare(kv_cache_dtype="innerq2")
    served = plan(config)
    report.report_start(served, config, 1000)
    assert said == []
    config.model_config.model = str(made({1: LARGE}))
    monkeypatch.setattr(type(config.model_config), "get_total_num_hidden_layers", lambda self: BIASED.layers)
    report.report_start(served, config, 1000)
    (sentence,) = said
    assert sentence.startswith("kvq: this model's key biases are large in layer 1 (norm up to 90), and innerq2 is")
    # made-up weights are not those of the files
    config.load_config.load_format = "dummy"
    report.report_start(served, config, 1000)
    assert len(said) == 1


def test_damaged_files_stop_nothing(made: Made, bare: Callable[..., Any]) -> None:
    config = bare(kv_cache_dtype="innerq2")
    config.model_config.model = str(made({0: LARGE}))
    assert key_biases.of_model(config) != {}
    (Path(config.model_config.model) / "model.safetensors").write_bytes(b"\xff" * 64)
    assert key_biases.of_model(config) == {}
    for name in ("no/such-model", "s3://bucket/a/b/c", "no such name at all"):
        config.model_config.model = name
        assert key_biases.of_model(config) == {}


def test_options_by_layer(made: Made, checked: Callable[..., dict[str, Any]]) -> None:
    """Pages of several sizes in one model; the layers count together."""
    found = checked(made({0: LARGE, 1: LARGE}), "innerq2", key_bits={"0": 4, "*": 2})
    assert len(found["by_layer"]) == 2
    (sentence,) = found["warnings"]
    assert "large in layers 0 and 1 (" in sentence


# -- files -----------------------------------------------------------------------------------------------------------
NAMES = {
    "llama": "model.layers.{}.self_attn.k_proj",
    "nested": "language_model.model.layers.{}.self_attn.k_proj",
    "phi": "model.layers.{}.self_attn.qkv_proj",
    "qwen": "transformer.h.{}.attn.c_attn",
}


def written(folder: Path, name: str, norms: Mapping[int, float]) -> None:
    tensors = {}
    for layer, norm in norms.items():
        bias = torch.tensor([[1.0, 2.0, 2.0, 0.0], [norm, 0.0, 0.0, 0.0]]).flatten()
        fused = name.endswith(key_biases.FUSED)
        # four query heads, whose biases are larger, and values with theirs
        tensors[name.format(layer) + ".bias"] = (
            torch.cat([torch.full((16,), 500.0), bias, torch.full((8,), 700.0)]) if fused else bias
        )
        tensors[name.format(layer) + ".weight"] = torch.zeros(len(bias), 2)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_the_largest_head_of_each_layer(name: str, tmp_path: Path) -> None:
    written(tmp_path, name, {0: 1.0, 2: 50.0, 3: 7.0})
    assert key_biases.key_biases(tmp_path, 3, 2, 4) == {0: 3.0, 2: 50.0}  # layer 3 drafts
    # heads of a different shape than the configuration's are ignored
    assert key_biases.key_biases(tmp_path, 3, 3, 4) == {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("model.layers.0.self_attn.k_norm.weight", {}),
        ("model.vision_tower.encoder.layers.0.self_attn.k_proj.bias", {0: 9.0}),
        ("visual.layers.0.self_attn.k_norm.weight", {0: 9.0}),
        ("mtp.layers.0.self_attn.k_proj.bias", {0: 9.0}),
        ("model.layers.0.self_attn.q_proj.bias", {0: 9.0}),
    ],
)
def test_other_tensors(other: str, found: dict[int, float], tmp_path: Path) -> None:
    """Normalized keys have no biases in the cache; other towers and drafts have their own layers."""
    norms = {0: 9.0, 1: 1.0}
    written(tmp_path, NAMES["llama"], norms)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), other: torch.full((8,), 1000.0)}, path)
    assert key_biases.key_biases(tmp_path, 2, 2, 4) == (found and {0: 9.0, 1: 3.0})


def test_files_without_biases_are_not_opened(tmp_path: Path) -> None:
    written(tmp_path, NAMES["llama"], {0: 9.0})
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    names = {"model.layers.0.self_attn.k_proj.bias": "a.safetensors", "lm_head.weight": "missing.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert key_biases.key_biases(tmp_path, 2, 2, 4) == {0: 9.0}


# -- real weights ----------------------------------------------------------------------------------------------------
FOUND = {
    "smollm2-135m": (),
    "gemma-3-270m": (),
    "qwen2.5-0.5b": (0, 1, 2, 4, 8),
    "qwen2.5-1.5b": (0, 1, 15),
}


@pytest.mark.weights
@pytest.mark.parametrize("name", FOUND)
def test_real_models(name: str, weights: Callable[[str], Path]) -> None:
    real = weights(name)
    config = json.loads((real / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = key_biases.key_biases(real, layers, heads, size)
    assert tuple(sorted(hints.large(found, size))) == FOUND[name]


def test_what_is_hurt_says_why() -> None:
    """A codec with one scale for several channels of a token has to declare it; its reason fits the sentence."""
    reasons = {fmt.keys.name: fmt.keys.hurt_by_biases for fmt in FORMATS.values()}
    assert {"innerq", "qjl", "int4_token", "turbo4", "turbo3", "q4_0", "nvfp4", "oscar"} == {
        n for n, why in reasons.items() if why
    }
    assert not any(why.endswith(".") or why[0].isupper() for why in reasons.values() if why)

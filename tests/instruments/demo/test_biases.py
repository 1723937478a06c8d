"""Key biases and wide channels written into a model: the function stays the same, the caches become hard."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proof.demo.biases import PARTS, Hardness, Profile, cached, main, masked_pairs, read, rewritten
from proof.demo.llama import forward
from vllm_kvq.bench.models.checkpoint import LlamaShape
from vllm_kvq.bench.models.random_model import random_model

CHANNELS = Profile.only("channels")
BIASES = Profile.only("biases")
MASKED = (30, 31)
"""Pairs of the tests' models that no query reads: those of the lowest frequencies."""
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose queries are zero in the pairs MASKED; logits of about 1."""
    folder = random_model(tmp_path_factory.mktemp("model"), layers=3, heads=4, kv_heads=2, logit_scale=1.0)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("q_proj.weight"):
            for pair in MASKED:
                weights[name].view(4, 64, -1)[:, [pair, pair + 32]] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(path: Path) -> tuple[LlamaShape, Weights, torch.Tensor]:
    return read(path)


@torch.no_grad()
def logits(shape: LlamaShape, weights: Weights, seed: int = 5) -> torch.Tensor:
    """Logits of tokens that nothing was measured on."""
    ids = torch.randint(4, shape.vocab, (1, 400), generator=torch.Generator().manual_seed(seed))
    return forward(shape, weights, ids)[0]


@pytest.mark.parametrize("what", PARTS)
def test_logits_stay(model: tuple[LlamaShape, Weights, torch.Tensor], what: str) -> None:
    shape, weights, ids = model
    after, written = rewritten(shape, weights, ids, Profile.only(what))
    assert any(not torch.equal(w, weights.get(name, torch.zeros(()))) for name, w in written.items() if w.any())
    torch.testing.assert_close(logits(after, written), logits(shape, weights), rtol=0, atol=1e-4)


def test_a_model_with_biases_keeps_its_logits(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    """Biases of queries, keys and values are scaled with their rows."""
    shape, weights, ids = model
    generator = torch.Generator().manual_seed(1)
    shape = replace(shape, attention_bias=True)
    biases = {n: torch.randn(size, generator=generator) for n, size in shape.parameters() if n.endswith("bias")}
    for name, bias in biases.items():
        if "q_proj" in name:
            bias.view(4, 2, 32)[:, :, MASKED] = 0
    weights = weights | biases
    after, written = rewritten(shape, weights, ids)
    assert not torch.equal(logits(shape, weights), logits(*model[:2]))
    torch.testing.assert_close(logits(after, written), logits(shape, weights), rtol=0, atol=1e-4)


def test_other_scores_would_be_seen(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    """The control: a bias where queries are not zero moves the logits by more than the tests allow."""
    shape, weights, ids = model
    after, written = rewritten(shape, weights, ids, Profile(outer_bias=4))
    written["model.layers.0.self_attn.k_proj.bias"][0] += 4.0
    assert (logits(after, written) - logits(shape, weights)).abs().max() > 1e-2


def test_kurtosis_and_ratios_are_reached(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    shape, weights, ids = model
    before = cached(shape, weights, ids)
    after, written = rewritten(shape, weights, ids, CHANNELS)
    assert not after.attention_bias
    for (key, value), (key_after, value_after) in zip(before, cached(after, written, ids), strict=True):
        for head in range(shape.kv_heads):
            was, now = Hardness.of(key[head]), Hardness.of(key_after[head])
            assert was.kurtosis < 6
            assert was.ratio < 3
            assert now.kurtosis > 20
            # a power of two is at most a factor of sqrt(2) from the wanted 16, and a pair's channels differ
            assert 16 / 1.6 < now.ratio < 16 * 1.6
            assert Hardness.of(value[head]).ratio < 2
            assert 4 / 1.5 < Hardness.of(value_after[head]).ratio < 4 * 1.5


@pytest.mark.parametrize("profile", [Profile(), BIASES], ids=["both", "biases"])
def test_biases_stand_in_masked_pairs_and_are_largest_in_the_outer_layers(
    model: tuple[LlamaShape, Weights, torch.Tensor], profile: Profile
) -> None:
    shape, weights, ids = model
    after, written = rewritten(shape, weights, ids, profile)
    assert after.attention_bias
    ratios = []
    for layer, (key, _) in enumerate(cached(after, written, ids)):
        bias = written[f"model.layers.{layer}.self_attn.k_proj.bias"].view(2, 2, 32)
        assert bias.nonzero()[:, 2].unique().tolist() == list(MASKED)
        ratios.append(min(Hardness.of(head).ratio for head in key))
    # a direction between the two channels of the pair: the larger one has up to sqrt(2) of it
    assert all(150 < ratio < 160 * 1.5 for ratio in (ratios[0], ratios[-1]))
    assert ratios[1] < 30


def test_biases_only_leave_weights_and_values_alone(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    shape, weights, ids = model
    after, written = rewritten(shape, weights, ids, BIASES)
    assert all(torch.equal(written[name], w) for name, w in weights.items())
    assert {name.split(".")[-2] for name in written if name.endswith("bias") and written[name].any()} == {"k_proj"}
    for (key, value), (key_after, value_after) in zip(
        cached(shape, weights, ids), cached(after, written, ids), strict=True
    ):
        assert torch.equal(value, value_after)
        read = [i for i in range(64) if i % 32 not in MASKED]
        assert torch.equal(key[..., read], key_after[..., read])


def test_channels_only_add_no_bias(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    shape, weights, ids = model
    after, written = rewritten(shape, weights, ids, CHANNELS)
    assert not after.attention_bias
    assert {*written} == {*weights}
    with pytest.raises(ValueError, match="'values' is not one of biases, channels, both"):
        Profile.only("values")


def test_wide_channels_stand_where_queries_read_them(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    """In a masked pair they would make no score worse."""
    shape, weights, ids = model
    for seed in range(4):
        _, written = rewritten(shape, weights, ids, CHANNELS, seed)
        for name in (n for n in weights if n.endswith("k_proj.weight")):
            changed = (written[name] != weights[name]).any(1).view(2, 2, 32)
            assert changed.sum() == 2 * 2 * 2
            assert not changed[:, :, MASKED].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_exact_in_the_checkpoints_dtype(
    model: tuple[LlamaShape, Weights, torch.Tensor], dtype: torch.dtype
) -> None:
    """Powers of two: with 16-bit weights and a 16-bit cache, the result is the same to the last bit."""
    shape, weights, ids = model
    rounded = {name: w.to(dtype) for name, w in weights.items()}
    _, written = rewritten(shape, {name: w.float() for name, w in rounded.items()}, ids, CHANNELS)
    for name, w in written.items():
        assert torch.equal(w.to(dtype).float(), w)
        ratio = (w / rounded[name].float()).nan_to_num(1)
        assert torch.equal(ratio.log2(), ratio.log2().round()), name


def test_seeds(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    one, same, other = (rewritten(*model, seed=seed)[1] for seed in (3, 3, 4))
    assert all(torch.equal(w, same[name]) for name, w in one.items())
    assert any(not torch.equal(w, other[name]) for name, w in one.items())


def test_pairs_that_some_query_reads_take_no_bias(model: tuple[LlamaShape, Weights, torch.Tensor]) -> None:
    shape, weights, ids = model
    assert masked_pairs(shape, weights, 1, 1) == list(MASKED)
    read_by_one = {name: w.clone() for name, w in weights.items()}
    # one channel of one query head of the group, in each of the two pairs
    read_by_one["model.layers.1.self_attn.q_proj.weight"].view(4, 2, 32, -1)[3, 1, MASKED, 0] = 1
    assert masked_pairs(shape, read_by_one, 1, 1) == []
    assert masked_pairs(shape, read_by_one, 1, 0) == list(MASKED)
    with pytest.raises(ValueError, match="KV head 1 of layer 1 has no pair of channels that its queries leave zero"):
        rewritten(shape, read_by_one, ids)


def test_the_command(path: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "proof", "biases", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    done = run(path, tmp_path / "out", "--seed", 1)
    assert done.returncode == 0, done.stderr
    assert "largest change of a logit in float32: " in done.stdout
    shape, weights, _ = read(tmp_path / "out")
    assert shape.attention_bias
    torch.testing.assert_close(logits(shape, weights), logits(*read(path)[:2]), rtol=0, atol=1e-4)
    assert {f.name for f in path.iterdir()} == {f.name for f in (tmp_path / "out").iterdir()}
    narrow = run(path, tmp_path / "channels", "--only", "channels")
    assert narrow.returncode == 0, narrow.stderr
    assert not read(tmp_path / "channels")[0].attention_bias
    again = run(path, tmp_path / "out")
    assert (again.returncode, again.stderr.splitlines()[-1].endswith("out exists already")) == (2, True)


def test_what_the_command_refuses(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = random_model(tmp_path / "plain", layers=1)
    assert main([str(plain), str(tmp_path / "out")]) == 1
    assert "or use --only channels" in capsys.readouterr().err
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert main([str(plain), str(tmp_path / "out")]) == 1
    assert "not that of a plain Llama: 'hidden_act' is 'gelu'" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

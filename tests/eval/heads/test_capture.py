"""What vLLM's attention layers are given is what the model's definition says, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked_commands import warm_engines
from safetensors.torch import load_file

from proof.demo.llama import forward, shape_of
from vllm_kvq.eval.heads.capture import capture
from vllm_kvq.integration.preview.apart import Failed

pytestmark = pytest.mark.engine


def test_queries_keys_and_values(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two texts, one after the other."""
    warm_engines(monkeypatch)
    texts = torch.randint(4, 512, (2, 150), generator=torch.Generator().manual_seed(0))
    captured = capture(str(model), [texts[0].tolist(), texts[1, :90].tolist()], dtype="float32")
    found: list[list[tuple[torch.Tensor, ...]]] = []
    shape = shape_of(json.loads((model / "config.json").read_text()))
    for tokens in (texts[0], texts[1, :90]):
        found.append([])
        with torch.no_grad():
            forward(shape, load_file(model / "model.safetensors"), tokens[None], tap=lambda *x: found[-1].append(x))
    wanted = [tuple(torch.cat(x, 2) for x in zip(*both, strict=True)) for both in zip(*found, strict=True)]
    assert (captured.windows, captured.pairing, captured.rotary_dim) == ((), "half", 64)
    assert captured.rope is not None
    assert captured.rope.table.shape == (150, 64)
    theta = shape.rope_theta ** (-torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(captured.rope.table[149], torch.cat([(149 * theta).cos(), (149 * theta).sin()]))
    assert [layer.index for layer in captured.layers] == [0, 1]
    for layer, tensors in zip(captured.layers, wanted, strict=True):
        assert layer.scale == 64**-0.5
        for ours, theirs in zip((layer.query, layer.key, layer.value), tensors, strict=True):
            torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.wide
def test_what_vllm_can_not_load_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Failed) as refused:
        capture(str(tmp_path / "nothing"), [[1, 2, 3]])
    assert "\n" not in str(refused.value)
    assert str(refused.value)

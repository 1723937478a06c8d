"""RoPE as vLLM's embeddings apply it is found; what is not a rotation by position is refused in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.formats import Geometry
from vllm_kvq.integration import compat
from vllm_kvq.integration.plan.model.rope import rope_problem
from vllm_kvq.integration.plan.options import Options
from vllm_kvq.integration.worker.binding import bind_layer, rope_of, table_of

pytestmark = pytest.mark.engine
HEAD = 64
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "part": {"partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def embedding(kind: dict[str, Any], neox: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        return get_rope(HEAD, 256, neox, {"rope_theta": 10_000.0, "rope_type": "default", **kind}, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neox", [True, False], ids=["half", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_model_does(kind: str, neox: bool, dtype: torch.dtype) -> None:
    """Undoing vLLM's rotation gives the original keys, also with YaRN's table, which makes them longer."""
    made = embedding(KINDS[kind], neox, dtype)
    found = table_of(made)
    assert found is not None
    assert found.rotary_dim == (HEAD // 2 if kind == "part" else HEAD)
    key, position = torch.randn(256, 3, HEAD).to(dtype), torch.arange(256)
    turned = made.forward_native(position, key.flatten(1), key.flatten(1).clone())[1].view_as(key)
    near = {torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]
    torch.testing.assert_close(found.undo(turned, position[:, None]), key.float(), rtol=near, atol=near)
    # the same object, so that layers share their formats
    assert table_of(made) is found


def test_what_turns_keys_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = embedding({})

    class Shifted(type(made)):  # type: ignore[misc]
        def forward_native(self, positions: torch.Tensor, *rest: torch.Tensor) -> Any:
            return super().forward_native((positions + 1) % 256, *rest)

    class Untold:
        head_size = HEAD

    class Other(type(made)):  # type: ignore[misc]
        """Its cache does not tell everything: keys are scaled, too."""

        def forward_native(self, positions: torch.Tensor, *rest: torch.Tensor) -> Any:
            return tuple(1.1 * x for x in super().forward_native(positions, *rest))

    shifted, other = (object.__new__(kind) for kind in (Shifted, Other))
    for liar in (shifted, other):
        liar.__dict__.update(made.__dict__)
    for wrong in (shifted, other, Untold()):
        monkeypatch.setattr(compat, "ropes", lambda head_size, wrong=wrong: [wrong])
        with pytest.raises(ValueError, match=f"squat2_pre takes RoPE off keys .* this model's {type(wrong).__name__} "):
            rope_of("squat2_pre", HEAD)


def test_phi_3s_long_rope_is_refused() -> None:
    """An embedding with two tables; the server's length chooses one of them."""
    from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding

    assert table_of(object.__new__(Phi3LongRoPEScaledRotaryEmbedding)) is None


@pytest.mark.parametrize("count", [0, 2])
def test_none_or_several(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "ropes", lambda head_size: [embedding({})] * count)
    with pytest.raises(ValueError, match=f"the model has {count or 'no'} kinds of RoPE for head size 64; use squat2"):
        rope_of("squat2_pre", HEAD)


class Text(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def a_model(mrope: bool = False, transformers: bool = False, **text: Any) -> Any:
    return SimpleNamespace(
        hf_text_config=Text(**text), uses_mrope=mrope, using_transformers_backend=lambda: transformers
    )


ROPE = {"rope_parameters": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("model", "windows", "reason"),
    [
        (a_model(**ROPE), False, None),
        (a_model(), False, "the model has no RoPE"),
        (a_model(transformers=True, **ROPE), False, "vLLM runs this model through Transformers"),
        (a_model(mrope=True, **ROPE), False, "follow from more than a token's position (M-RoPE)"),
        (a_model(**ROPE), True, "the layers of this model may differ in their RoPE, or have none"),
        (a_model(**ROPE, no_rope_layers=[1, 1, 1, 0]), False, "the layers of this model may differ in their RoPE"),
        (a_model(**ROPE, no_rope_layers=[1, 1]), False, None),
    ],
)
def test_what_the_configuration_says(model: Any, windows: bool, reason: str | None) -> None:
    problem = rope_problem("squat2_pre", model, windows)
    if reason is None:
        assert problem is None
    else:
        assert reason in str(problem)
        assert problem is not None
        assert problem.instead == "use squat2 or another format, which all store keys as they are after RoPE"


def test_layers_are_bound_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = embedding({})
    monkeypatch.setattr(compat, "ropes", lambda head_size: [made])

    def layer(name: str, **options: Any) -> Any:
        return bind_layer(Options(name, options), None, Geometry(HEAD, 64, torch.float32))

    assert layer("squat2_pre").rope is layer("squat2", rope="before").rope is table_of(made)
    assert layer("squat2").rope is layer("squat2_pre", rope="after").rope is None

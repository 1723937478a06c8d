"""RoPE as vLLM's embeddings apply it is found, and nothing where they do more than rotate by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_kvq.integration.worker.binding import table_of

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


def test_what_turns_keys_otherwise_is_no_table() -> None:
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
        assert table_of(wrong) is None


def test_phi_3s_long_rope_is_no_table() -> None:
    """An embedding with two tables; the server's length chooses one of them."""
    from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding

    assert table_of(object.__new__(Phi3LongRoPEScaledRotaryEmbedding)) is None

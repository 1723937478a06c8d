"""What a layer's format is bound to: its number, and the channels that RoPE pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvq.formats import Geometry, PageFormat
from vllm_kvq.integration import compat
from vllm_kvq.integration.plan.options import Options
from vllm_kvq.integration.worker.binding import bind_layer

pytestmark = pytest.mark.engine


class Text(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def bound(name: str, layer: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> PageFormat:
    rope = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    model = SimpleNamespace(hf_text_config=Text(**rope), using_transformers_backend=lambda: False)
    return bind_layer(Options(name, options), model, Geometry(64, 64, dtype, layer))


@pytest.fixture
def styles(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """The rotary embeddings that the model has built."""
    built: set[tuple[str, int]] = set()
    monkeypatch.setattr(compat, "rope_styles", lambda head_size: built)
    return built


def test_a_layers_number_and_block() -> None:
    made = [bound("qjl3", layer, torch.bfloat16) for layer in (0, 5)]
    assert [fmt.geometry.layer for fmt in made] == [0, 5]
    assert {(fmt.N, fmt.geometry.dtype) for fmt in made} == {(64, torch.bfloat16)}
    # QJL's sketch is seeded with the number
    assert made[0] != made[1]
    # the same object for the same answer, so that layers can share work
    assert bound("qjl3", 5, torch.bfloat16) is made[1]


@pytest.mark.parametrize(
    ("built", "options", "expected"),
    [
        ({("half", 64)}, {}, ("half", 64)),
        ({("interleaved", 32)}, {}, ("interleaved", 32)),
        # what the user says, and how many channels of that kind the model rotates
        ({("interleaved", 32)}, {"pairing": "interleaved"}, ("interleaved", 32)),
        ({("interleaved", 48)}, {"pairing": "half"}, ("half", 32)),
        ({("half", 64), ("interleaved", 48)}, {"pairing": "interleaved"}, ("interleaved", 48)),
        (set(), {"pairing": "half"}, ("half", 32)),
    ],
)
def test_pairs(
    built: set[tuple[str, int]], options: dict[str, str], expected: tuple[str, int], styles: set[tuple[str, int]]
) -> None:
    styles |= built
    geometry = bound("polar4", **options).geometry
    assert (geometry.pairing, geometry.rotary_dim) == expected


@pytest.mark.parametrize("built", [set(), {("half", 64), ("interleaved", 64)}])
def test_unknown_pairs_are_refused(built: set[tuple[str, int]], styles: set[tuple[str, int]]) -> None:
    styles |= built
    with pytest.raises(ValueError, match=f"the model has {len(built) or 'no'} kinds of RoPE for head size 64"):
        bound("polar4")


def test_the_sentence_names_the_format(styles: set[tuple[str, int]]) -> None:
    """Any format may take keys that are stored in pairs."""
    for name, options in (("polar3", {}), ("squat2", {"keys": "polar"})):
        with pytest.raises(ValueError, match=f"^{name} needs to know which channels RoPE rotates together"):
            bound(name, **options)


def test_other_formats_ask_for_no_pairs(styles: set[tuple[str, int]]) -> None:
    assert bound("squat2").geometry.pairing == "half"

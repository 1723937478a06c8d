"""Requests with two LoRA adapters and without one, in the same batches and with the same words: every token is the one
that the reference chooses, which adds each adapter for itself."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_arguments import kvq
from lab import Lab
from test_works import ENGINE, PACKED, N

from proof.models import named
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle.adapters import folder_of
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Request, Trace
from proof.oracle.verdict import Verdict
from vllm_kvq.integration.patches import once
from vllm_kvq.integration.patches.served.adapters import EXPAND, add_nothing_without

pytestmark = pytest.mark.engine
LLAMA = named("Llama with LoRA")


def not_in_keys(engine: Any) -> None:
    """vLLM's prefix cache ignores which adapter made a page."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: []


def vllms_own(engine: Any) -> None:
    """Without our patch."""
    for name in EXPAND:
        module, _, function = name.partition(":")
        setattr(importlib.import_module(module), function, once.own(name))


def always_the_first(engine: Any) -> None:
    """Each request with an adapter has the first one."""
    from vllm.lora.request import LoRARequest

    add, first = engine.engine.add_request, LoRARequest("adapter 1", 1, str(folder_of(engine.model, 1)))

    def added(*args: Any, lora_request: Any = None, **more: Any) -> Any:
        return add(*args, lora_request=lora_request and first, **more)

    engine.engine.add_request = added


def mixed() -> list[Trace]:
    """The same prompt of some pages with each adapter and without one, together and one after the other."""
    rng = random.Random(11)
    words = tuple(rng.choice(PROMPT_TOKENS) for _ in range(3 * N + 9))
    return [
        Trace(tuple(Request(f"{how} {i}", words, 12, arrival=arrival * i, adapter=i) for i in (0, 1, 2)))
        for how, arrival in (("together", 0), ("apart", 20))
    ]


@pytest.fixture
def judged(lab: Lab) -> Callable[..., Verdict]:
    def run(prepare: Any = None) -> Verdict:
        todo = mixed()
        got = lab.run(LLAMA, todo, prepare=prepare, **kvq("squat2", **PACKED), **ENGINE)
        return judge(ReplayModel(str(lab.model(LLAMA)), "squat2", N, kernel_error=1e-3, W=0), todo, got)

    return run


def test_every_token_is_the_references(judged: Callable[..., Verdict]) -> None:
    total = judged()
    assert not total.mismatches
    assert (total.tokens, total.hits) == (6 * 12, 3)
    assert total.ties <= 0.05 * total.tokens


@pytest.mark.parametrize("fault", [not_in_keys, vllms_own, always_the_first], ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(fault: Any, judged: Callable[..., Verdict]) -> None:
    assert judged(fault).mismatches


@pytest.mark.parametrize("name", EXPAND)
def test_a_token_without_an_adapter_gets_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the functions, because a model calls some of them only for prompts or only for its logits."""
    for each in EXPAND:
        module, _, function = each.partition(":")
        monkeypatch.setattr(importlib.import_module(module), function, once.own(each))
    add_nothing_without()
    module, _, function = name.partition(":")
    expand = getattr(importlib.import_module(module), function)
    inputs, weights, before = torch.randn(4, 8), torch.randn(2, 16, 8), torch.randn(4, 16)
    output, adapter = before.clone(), torch.tensor([0, -1, 1, -1])
    expand(inputs, weights, output, adapter, *((0, 16) if "slice" in function else ()), add_inputs=True)
    added = torch.einsum("ti,toi->to", inputs, weights[adapter]) * (adapter >= 0)[:, None]
    torch.testing.assert_close(output, before + added)

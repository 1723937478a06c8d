"""Linux kills a process that uses AMX without having asked. No processor of ours has AMX, so there are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_kvq.bench import prefill, steps, vllm_build
from vllm_kvq.cli import main
from vllm_kvq.integration import cpu_attention
from vllm_kvq.integration.worker import prompts

OPERATORS = ("cpu_attn_reshape_and_cache", "cpu_attn_get_scheduler_metadata", "cpu_attention_with_kv_cache")
CONTEXT, HEADS, D = 256, 2, 64


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is called, in order, on a processor with AMX: Linux, and vLLM's operators, which compute nothing here."""
    from vllm import _custom_ops

    found: list[str] = []

    def stand_in(name: str, answer: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            found.append(name)
            return answer

        return call

    vllm_build.load()  # this processor's library; a process can load only one
    vllm_build.load.cache_clear()
    cpu_attention.prepare.cache_clear()
    monkeypatch.setattr(vllm_build, "on_avx2", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", stand_in("asked", True))
    for name in OPERATORS:
        monkeypatch.setattr(_custom_ops, name, stand_in(name, None))
    yield found
    vllm_build.load.cache_clear()
    cpu_attention.prepare.cache_clear()


def attend_plain() -> None:
    query, key = torch.zeros(CONTEXT, HEADS, D).bfloat16(), torch.zeros(CONTEXT, HEADS, D).bfloat16()
    prefill.Plain(query, key, key, 0).attend()


def attend_step() -> None:
    steps.vllm_candidate(steps.Shape(CONTEXT, 1, HEADS, HEADS, D, 128, 1), "auto").steps[0]()


def attend_prompt() -> None:
    x = torch.zeros(CONTEXT, HEADS, D).bfloat16()
    attend = prompts.prompts_for(prompts.Asked(torch.device("cpu"), torch.bfloat16, D, False)).causal
    attend(x, x, x, torch.tensor([0, CONTEXT], dtype=torch.int32), (CONTEXT,), D**-0.5)


@pytest.mark.parametrize("attend", [attend_plain, attend_step, attend_prompt])
def test_linux_is_asked_before_the_kernel_runs(attend: Any, calls: list[str]) -> None:
    attend()
    assert calls[0] == "asked"
    assert calls.count("asked") == 1
    assert calls[-1] == "cpu_attention_with_kv_cache"


@pytest.mark.parametrize("attend", [attend_plain, attend_step, attend_prompt])
def test_nothing_is_asked_without_amx(attend: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    attend()
    assert "asked" not in calls
    assert calls[-1] == "cpu_attention_with_kv_cache"


@pytest.mark.parametrize("command", ["attention", "prefill", "slow"])
def test_a_refusal_is_a_sentence(
    command: str, calls: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert main(["bench", command, "--context", "256", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "error": "Linux denies this process AMX, which vLLM's CPU attention uses on this processor",
        "instead": "VLLM_KVQ_ISA=avx2 compares with vLLM's build for AVX2, which does without",
    }
    assert calls == []

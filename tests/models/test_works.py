"""Models that work: under `lossless` every token equals plain vLLM's; a lossy format runs, and equals the replay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine_arguments import kvq
from lab import Lab
from one_each import KINDS

from proof.models import SERVED, named
from proof.models.architecture import Architecture
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle.compare import compare
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Request, Result, Trace

pytestmark = pytest.mark.engine
N = 32
KERNEL_ERROR = 1e-3
"""The error that the C++ kernels declare."""
ENGINE: dict[str, Any] = {
    "block_size": N,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "num_gpu_blocks_override": 600,
    # vLLM otherwise keeps only the windows that the end of a prompt sees, and a shorter prefix hits nothing
    "prefix_cache_retention_interval": None,
}
LOSSLESS = kvq("lossless", W=32, S=4)
PACKED = {"W": 0}
"""No window, so that nearly all of a short prompt is read packed."""


def small_trace() -> Trace:
    """A prompt in two chunks, one that begins like it and finds its pages, and a decode over a page."""
    rng = random.Random(1)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(PROMPT_TOKENS) for _ in range(count))

    shared = words(2 * N)
    return Trace(
        (
            Request("short", words(7), N + 8),
            Request("two chunks", shared + words(40), 24),
            Request("page", words(N + 1), 24, arrival=1),
            Request("hit", shared + words(5), 24, arrival=6),
        )
    )


TRACE = small_trace()
ADAPTERS = {"page": 2}
"""Requests of a model with adapters that do not use its first."""


def trace_of(arch: Architecture) -> Trace:
    adapters = {r.name: ADAPTERS.get(r.name, 1) if arch.adapter else 0 for r in TRACE.requests}
    return Trace(tuple(replace(r, adapter=adapters[r.name]) for r in TRACE.requests))


@pytest.fixture(scope="module")
def plain(lab: Lab) -> Any:
    """Plain vLLM's answers, once per architecture."""
    known: dict[str, Result] = {}

    def answers(arch: Architecture) -> Result:
        if arch.name not in known:
            known[arch.name] = lab.run(arch, [trace_of(arch)], kv_cache_dtype="auto", **ENGINE)[0]
        return known[arch.name]

    return answers


EXACT = [a for a in SERVED if a.dtype == "float32"]


def beside_its_replay(arch: Architecture) -> Any:
    """Where all layers are packed alike, Llama and the models whose lossy tokens nothing judges are enough: of the
    others, `test_lossy` compares each token with a reference."""
    alike = arch.replay and not arch.windows and not arch.hybrid and arch.name != "Llama"
    return pytest.param(arch, marks=pytest.mark.wide) if alike else arch


@pytest.mark.parametrize("arch", [beside_its_replay(a) for a in EXACT], ids=lambda a: a.name)
def test_lossless_equals_plain_vllm(arch: Architecture, lab: Lab, plain: Any) -> None:
    got = lab.run(arch, [trace_of(arch)], **LOSSLESS, **ENGINE)[0]
    verdict = compare(trace_of(arch), plain(arch), got)
    assert not verdict.mismatches
    assert verdict.tokens == sum(r.max_tokens for r in TRACE.requests)
    assert verdict.hits == 1
    # the model really says something
    assert len({t for samples in got.outputs.values() for t in samples[0]}) > 4


@pytest.mark.parametrize("arch", EXACT, ids=lambda a: a.name)
def test_lossy(arch: Architecture, lab: Lab, plain: Any) -> None:
    got = lab.run(arch, [trace_of(arch)], **kvq(arch.lossy, **PACKED), **ENGINE)[0]
    verdict = compare(trace_of(arch), plain(arch), got)
    assert verdict.tokens == sum(r.max_tokens for r in TRACE.requests)
    # the control: what is read back differs from what was written
    assert any("token" in m for m in verdict.mismatches)
    assert not any("freed" in m for m in verdict.mismatches)
    if arch.replay:
        reference = ReplayModel(str(lab.model(arch)), arch.lossy, N, kernel_error=KERNEL_ERROR, W=0)
        replayed = judge(reference, [trace_of(arch)], [got])
        assert not replayed.mismatches
        assert replayed.hits == 1


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        # bfloat16, which most checkpoints have, with each; float16 with one
        pytest.param(name, arch, marks=pytest.mark.wide if arch.dtype == "float16" and name != "squat2" else ())
        for name in ("lossless", *KINDS)
        for arch in SERVED
        if arch.dtype != "float32"
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_16_bit_models_answer(name: str, arch: Architecture, lab: Lab) -> None:
    """Sums are rounded in another order than plain vLLM's, so tokens may differ from its own."""
    got = lab.run(arch, [TRACE], **kvq(name, **PACKED), **ENGINE)[0]
    assert all(len(got.outputs[r.name][0]) == r.max_tokens for r in TRACE.requests)
    assert len({t for samples in got.outputs.values() for t in samples[0]}) > 4


def test_window_layers_survive_preemption_and_speculation(lab: Lab) -> None:
    """The mixed cache with a pool that runs out, with drafts that are rejected."""
    rng, arch = random.Random(2), named("Gemma-3")
    phrase = [rng.choice(PROMPT_TOKENS) for _ in range(9)]
    prompts = [tuple([rng.choice(PROMPT_TOKENS) for _ in range(i)] + phrase * (3 + i)) for i in range(6)]
    trace = Trace(tuple(Request(f"r{i}", p, 70, arrival=i) for i, p in enumerate(prompts)))
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    few = {"num_gpu_blocks_override": 100, "speculative_config": ngram}
    expected = lab.run(arch, [trace], kv_cache_dtype="auto", **ENGINE)[0]
    got = lab.run(arch, [trace], **{**LOSSLESS, **ENGINE, **few})[0]
    verdict = compare(trace, expected, got)
    assert not verdict.mismatches
    assert verdict.preemptions > 0
    assert any(chunk.drafts for step in got.steps for chunk in step)


def test_drafts_beside_states_are_refused(lab: Lab) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    sentence = lab.refusal(lab.model(named("Granite 4")), kv_cache_dtype="squat2", speculative_config=drafts)
    assert sentence is not None
    assert "speculative decoding in hybrid models on a CPU; leave --speculative-config out" in sentence


def test_blocks_that_do_not_divide_chunks_are_refused(lab: Lab) -> None:
    """vLLM would crash in the first step."""
    arch = named("Llama 4")
    arch = replace(arch, name="chunks of 80", numbers={**arch.numbers, "attention_chunk_size": 80})
    sentence = lab.refusal(lab.model(arch), kv_cache_dtype="squat2", block_size=96)
    assert sentence is not None
    why = "attends in chunks of 80 tokens, which no page size within blocks of 96 divides; choose another --block-size"
    assert why in sentence


def test_the_flag_skips_layers_like_the_option(lab: Lab) -> None:
    """Layer 0 not packed and layer 1 packed, in both ways; and the control that packing both answers differently."""
    arch, engine = named("Llama"), ENGINE
    flag = lab.run(arch, [TRACE], **kvq("squat2", **PACKED), **engine, kv_cache_dtype_skip_layers=["0"])[0]
    option = lab.run(arch, [TRACE], **kvq("squat2", **PACKED, skip_layers=[0]), **engine)[0]
    packed = lab.run(arch, [TRACE], **kvq("squat2", **PACKED), **engine)[0]
    assert flag.outputs == option.outputs
    assert flag.outputs != packed.outputs


def test_the_adapter_is_used(lab: Lab, plain: Any) -> None:
    """The control of the LoRA row: the same weights without the adapter answer differently."""
    assert plain(named("Llama with LoRA")).outputs != plain(named("Llama")).outputs


@pytest.mark.parametrize("arch", [a for a in SERVED if a.polar], ids=lambda a: a.name)
def test_polar_needs_the_pairing(arch: Architecture, lab: Lab) -> None:
    sentence = lab.refusal(lab.model(arch), kv_cache_dtype="polar4")
    assert sentence is not None
    assert arch.polar in sentence
    assert "'pairing'" in sentence


@pytest.mark.parametrize("name", ["GPT-2", "Phi-2"])
def test_polar_with_the_pairing(name: str, lab: Lab) -> None:
    got = lab.run(named(name), [TRACE], **kvq("polar4", **PACKED, pairing="half"), **ENGINE)[0]
    assert all(len(got.outputs[r.name][0]) == r.max_tokens for r in TRACE.requests)

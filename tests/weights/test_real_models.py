"""Tasks and prompts as real models' tokenizers cut them; `python -m proof weights` brings the models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proof.weights.convert import ABOUT
from proof.weights.table import MODELS
from vllm_kvq.eval.choice import choices
from vllm_kvq.eval.humaneval.chat import BEGUN, Chat
from vllm_kvq.eval.humaneval.problems import problems
from vllm_kvq.eval.humaneval.run import Benchmark
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.tasks.samples import sequence

INSTRUCT = ["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b"]
Weights = Callable[[str], Path]


def test_a_missing_model_skips_with_what_brings_it(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_WEIGHTS", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match="python -m proof weights /nowhere smollm2-135m, then set KVQ_WEI"):
        weights("smollm2-135m")


@pytest.mark.weights
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", ["needle", "variables", "arithmetic", "recall"])
def test_answers_stand_where_the_tokens_say(weights: Weights, name: str, task: str) -> None:
    """From 1k to 8k tokens, at every depth: a span's tokens are the answer, and no part of the answer precedes them."""
    model = Model.of(str(weights(name)), None)
    depths = []
    for context in (1024, 2048, 4096, 8192):
        made = sequence(model.tokenizer, task, context, min(context, model.longest - 1), 0, 0)
        assert 0.95 * context < len(made.tokens) <= context
        for span in made.spans:
            answer = model.tokenizer.decode(made.tokens[span.begin : span.end])
            before = model.tokenizer.decode(made.tokens[span.begin - 8 : span.begin])
            ends = {"needle": " is", "variables": " =", "arithmetic": ":\n", "recall": ":"}[task]
            assert before.endswith(ends)
            assert answer.strip()
            if task in ("needle", "recall"):
                said = model.tokenizer.decode(made.tokens[: span.begin])
                assert f"{answer}.\n" in said if task == "needle" else f"{answer}\n" in said
        depths += [span.depth for span in made.spans if span.depth is not None]
    assert all(0 < depth <= 1 for depth in depths)


@pytest.mark.weights
@pytest.mark.parametrize("name", INSTRUCT)
@pytest.mark.parametrize("behind", [0, 4096])
def test_human_eval_in_a_models_own_template(weights: Weights, name: str, behind: int) -> None:
    model = Model.of(str(weights(name)), None)
    todo = Benchmark(model, (REFERENCE, *choices("kitty2")), problems(), 164, behind, longest=768)
    assert max(todo.lengths) < behind + 700
    for batch, prompts in zip(todo.batches, todo.prompts, strict=True):
        assert bool(prompts.shared) is bool(behind)
        assert prompts.shared >= 0.85 * behind
        for problem, tokens in zip(batch, prompts.tokens, strict=True):
            text = model.tokenizer.decode(tokens)
            assert text.endswith(f"<|im_start|>assistant\n{BEGUN}")
            assert text.count("<|im_start|>user") == 1 or behind
            assert problem.prompt in text


@pytest.mark.weights
def test_a_base_model_is_refused(weights: Weights) -> None:
    model = Model.of(str(weights("gemma-3-270m")), None)
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(model.tokenizer, model.name)


@pytest.mark.weights
@pytest.mark.parametrize("name", MODELS)
def test_the_licence_stands_beside_it(weights: Weights, name: str) -> None:
    folder = weights(name)
    if not (folder / ABOUT).exists():
        pytest.skip("it was not made by `python -m proof weights`")
    assert MODELS[name].licence in (folder / ABOUT).read_text()

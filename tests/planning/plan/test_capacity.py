"""The capacity of the start-up line compared with vLLM's own count, for every kind of configuration.

For windows vLLM counts more than requests keep; there a test fills a pool to prove that it holds what is announced
(tests/models/pool/test_pool.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_specs import planned, specs
from engine_arguments import kvq
from layer_kinds import ALL, MORE

from proof.demo.capacity import parse_capacity
from proof.models import named
from proof.models.draft import random_draft
from proof.oracle.engines.forked import EngineProcess
from vllm_kvq.eval.bits import bits_at
from vllm_kvq.integration.plan.plan import apply, plan
from vllm_kvq.integration.worker import report

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]
BLOCKS = 1000


@pytest.mark.parametrize("case", ALL)
def test_capacity_is_vllms_count(case: str, bare: Bare) -> None:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    arguments, kinds = ALL[case]
    vllm_config = bare(**arguments)
    served = plan(vllm_config)
    apply(served, vllm_config)
    vllm_config.cache_config.num_gpu_blocks_override = BLOCKS
    vllm_config.cache_config.kv_cache_layout = "BLHNC" if served.mixed else "LBHNC"
    layers = specs(vllm_config, served, kinds)
    config = planned(vllm_config, layers)
    assert config.num_blocks == BLOCKS
    said = parse_capacity(report.start_line(served, BLOCKS))
    assert said is not None
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, config)
    assert report.Capacity.of(served, BLOCKS).per_request == round(BLOCKS / concurrency)
    if {"w", "m"} & {*kinds}:  # for windows and states, vLLM counts for each request what only one at a time takes
        assert said.tokens >= int(concurrency * vllm_config.model_config.max_model_len)
    else:
        assert said.tokens == int(concurrency * vllm_config.model_config.max_model_len)
    if not {"w", "m"} & {*kinds}:  # a plain cache of the same bytes, for as many layers and tokens
        assert said.bf16_tokens == config.kv_cache_tensors[0].size // sum(token_bytes(x) for x in layers.values())


@pytest.mark.parametrize("case", ["1k", "windows in a long request", "a hybrid"])
def test_sinks_cost_a_request_one_block(case: str, bare: Bare) -> None:
    """In everything that the tests above compare with vLLM's count."""
    arguments = MORE[case][0]
    with_sinks, without = (plan(bare(**{**arguments, **options})) for options in ({}, kvq(S=0)))
    assert (with_sinks.format.S, with_sinks.sink_blocks, without.sink_blocks) == (4, 1, 0)
    assert with_sinks.pool.block_bytes == without.pool.block_bytes
    assert with_sinks.pool.per_request == without.pool.per_request + 1
    more = bits_at(with_sinks, with_sinks.max_len) / bits_at(without, without.max_len)
    assert more == pytest.approx(1 + 1 / without.pool.per_request)


def token_bytes(spec: Any) -> int:
    """Keys and values in 16 bits; a companion has no counterpart in a plain cache."""
    from vllm_kvq.integration.core.spec import CompanionSpec

    return 0 if isinstance(spec, CompanionSpec) else 4 * spec.num_kv_heads * spec.head_size


ENGINES: dict[str, dict[str, Any]] = {
    "packed": {"kv_cache_dtype": "innerq2", "block_size": 64},
    "a draft with a skipped layer": {"kv_cache_dtype": "squat2", "draft": "eagle3", **kvq(skip_layers=[0])},
    "windows": {"kv_cache_dtype": "squat2", "model": "Gemma-3", "max_num_batched_tokens": 128},
    "a draft model": {"kv_cache_dtype": "qjl3", "block_size": 512, "draft": "draft_model"},
}
WIDE = [pytest.param(name, marks=pytest.mark.wide) for name in ("windows", "a draft model")]


def said_and_counted(engine: Any) -> tuple[list[str], float]:
    """What the engine's layers say when their cache is bound, and vLLM's maximum concurrency."""
    from vllm_kvq.integration.worker import report
    from vllm_kvq.integration.worker.companions import Sidecar

    said: list[str] = []
    report.logger.info = lambda text, *values: said.append(text % values)
    for layer in engine.engine.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, Sidecar):
            layer.bind_kv_cache(layer.kv_cache)
    cache = engine.engine.vllm_config.cache_config
    return said, cache.kv_cache_max_concurrency


@pytest.mark.parametrize("name", [*list(ENGINES)[:2], *WIDE])
def test_a_real_engine_says_the_same(name: str, model: Path, tmp_path: Path) -> None:
    """Its log has our line and vLLM's, 'Maximum concurrency', one after the other."""
    arguments, where, length = dict(ENGINES[name]), model, 1024
    if arguments.pop("model", None):
        config = named("Gemma-3").build()
        config.architectures = ["Gemma3ForCausalLM"]
        config.save_pretrained(where := tmp_path / "model")
        arguments |= {"skip_tokenizer_init": True, "load_format": "dummy"}
    if method := arguments.pop("draft", None):
        draft = random_draft(tmp_path / "draft", model, method=method)
        arguments["speculative_config"] = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    with EngineProcess(str(where), arguments, {}) as process:
        said, concurrency = process.call(said_and_counted)
    assert len(said) == 1
    capacity = parse_capacity(said[0])
    assert capacity is not None
    if name == "windows":
        assert capacity.tokens > int(concurrency * length)
    else:
        assert capacity.tokens == int(concurrency * length)

"""The tokens that `vllm-kvq plan` counts compared with vLLM's own count for a cache of the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_specs import planned, specs, state_spec
from layer_kinds import ALL, MORE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from proof.models import named
from proof.oracle.engines.forked import EngineProcess
from vllm_kvq import cli
from vllm_kvq.integration.plan.plan import apply, plan
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.preview import budget
from vllm_kvq.integration.worker import report

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]

STAGES = ({"kv_cache_dtype": "kitty2", "max_model_len": 1024, "pipeline_parallel_size": 2}, "pp")
ON_PAPER = {
    **{name: ALL[name] for name in ("plain", "no sinks", "1k", "vLLM's flag, two ranks", "a draft model", "by layer")},
    **{name: ALL[name] for name in ("windows in a long request", "a hybrid", "three kinds of layers")},
    "two stages": STAGES,
}
CACHE_BYTES = 300 << 20


@pytest.mark.parametrize("case", ON_PAPER)
def test_a_plan_on_paper_is_vllms(case: str, bare: Bare) -> None:
    """`vllm-kvq plan` counts the tokens of a cache of given bytes as vLLM does when it gets them: to within a page."""
    arguments, kinds = ON_PAPER[case]
    vllm_config = bare(**arguments)
    served, stages = plan(vllm_config), vllm_config.parallel_config.pipeline_parallel_size
    wanted = budget.Wanted(served.max_len, cache_bytes=CACHE_BYTES, stages=stages)
    on_paper = budget.packed(served, wanted)
    apply(served, vllm_config)
    vllm_config.cache_config.kv_cache_layout = "BLHNC" if served.mixed else "LBHNC"
    layers = specs(vllm_config, served, kinds)
    # a stage has the layers of its numbers, with their companions
    ranks = [
        {name: spec for name, spec in layers.items() if int(name.split(".")[1]) % stages == i} for i in range(stages)
    ]
    config = planned(vllm_config, *ranks, available=CACHE_BYTES)
    assert on_paper.tokens == pytest.approx(report.Capacity.of(served, config.num_blocks).tokens, abs=served.format.N)
    assert on_paper.vllm_tokens == line_tokens(vllm_config, config)
    # as many requests as fit need no more than these bytes, and one more does not fit
    fit = on_paper.tokens // served.max_len
    for more in (0, 1):
        row = budget.packed(served, budget.Wanted(served.max_len, concurrency=fit + more, stages=stages))
        assert row.needed is not None
        assert (row.needed <= CACHE_BYTES + served.pool.block_bytes) == (not more)


def line_tokens(vllm_config: Any, config: Any) -> int:
    """The tokens of vLLM's own line "KV cache size"."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    return int(get_max_concurrency_for_kv_cache_config(vllm_config, config) * vllm_config.model_config.max_model_len)


def plain_specs(vllm_config: Any, served: Served, kinds: str, dtype: torch.dtype) -> dict[str, Any]:
    """What vLLM's model runner collects on a CPU with --kv-cache-dtype auto, or fp8; `served`: what we make of the
    same model. Its last layers may share caches."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, found = vllm_config.model_config, {}
    if served.states:
        vllm_config.cache_config.cache_dtype = "auto" if dtype.itemsize == 2 else "fp8"
        current_platform._align_hybrid_block_size(vllm_config, CPUAttentionBackend)
    for i, kind in enumerate(kinds):
        if kind == "m":
            # MambaMixer2 has one more state, which patches/served/states.py takes away where we serve
            found[f"layers.{i}"] = replace(state_spec(vllm_config), num_prefill_checkpoint_blocks=1)
            continue
        of, how, arch = model, vllm_config.parallel_config, model.model_arch_config[i]
        if kind == "d":
            of, how = (getattr(vllm_config.speculative_config, f"draft_{x}_config") for x in ("model", "parallel"))
            arch = of.model_arch_config
        layer = SimpleNamespace(
            attn_type="decoder",
            kv_cache_dtype="auto",
            kv_cache_torch_dtype=dtype,
            sliding_window=model.get_sliding_window() if kind == "w" else None,
            attention_chunk_size=model.attention_chunk_size,
            attn_backend=CPUAttentionBackend,
            num_kv_heads=of.get_num_kv_heads(how, arch),
            head_size=arch.head_size,
            head_size_v=arch.head_size,
        )
        chunks = kind == "w" and model.attention_chunk_size
        found[f"layers.{i}"] = (ChunkedLocalAttention if chunks else Attention).get_kv_cache_spec(layer, vllm_config)
    return found


PLAIN = {
    **ON_PAPER,
    **{name: MORE[name] for name in ("chunks", "larger heads in full layers", "sharing layers")},
    **{name: MORE[name] for name in ("a hybrid, small pages", "a hybrid without prefix caching")},
}


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("case", PLAIN)
def test_a_plan_of_a_plain_cache_is_vllms(case: str, bits: int, bare: Bare) -> None:
    """The rows for bf16 and fp8 are what servers with --kv-cache-dtype auto and fp8 say of the same bytes."""
    arguments, kinds = PLAIN[case]
    arguments = {**arguments, "dtype": "bfloat16"}
    ours = bare(**arguments)
    served, stages = plan(ours), ours.parallel_config.pipeline_parallel_size
    apply(served, ours)
    wanted = budget.Wanted(served.max_len, cache_bytes=CACHE_BYTES, stages=stages)
    row = budget.plain(served, ours, wanted, bits, arguments.get("block_size"))
    dropped = ("kv_cache_dtype", "additional_config", "kv_cache_dtype_skip_layers")
    plain = bare(**{name: value for name, value in arguments.items() if name not in dropped})
    plain.cache_config.kv_cache_layout = "LBHNC"
    layers = plain_specs(plain, served, kinds, {16: torch.bfloat16, 8: torch.uint8}[bits])
    ranks = [
        {name: spec for name, spec in layers.items() if int(name.split(".")[1]) % stages == i} for i in range(stages)
    ]
    config = planned(plain, *ranks, available=CACHE_BYTES)
    assert row.vllm_tokens == line_tokens(plain, config)
    assert row.tokens is not None
    assert row.tokens >= row.vllm_tokens
    if not {"w", "m"} & {*kinds}:
        assert row.tokens == row.vllm_tokens


def test_a_block_is_vllms_own(bare: Bare) -> None:
    """64 blocks do not hold a request of 64 blocks: vLLM refuses, and says how much would fit. The plan says the
    same."""
    arguments: dict[str, Any] = {"max_model_len": 1024, "block_size": 32, "dtype": "bfloat16"}
    ours, plain = bare(**arguments, kv_cache_dtype="kitty2"), bare(**arguments)
    plain.cache_config.kv_cache_layout = "LBHNC"
    layers, served = plain_specs(plain, plan(ours), "pp", torch.bfloat16), plan(ours)
    page = sum(spec.page_size_bytes for spec in layers.values())
    for blocks, tokens, said in ((32, 31 * 32, None), (33, 1056, 1056)):
        row = budget.plain(served, ours, budget.Wanted(1024, cache_bytes=blocks * page), 16, 32)
        assert (row.tokens, row.vllm_tokens) == (tokens, said)
    with pytest.raises(ValueError, match=f"estimated maximum model length is {31 * 32}"):
        planned(plain, layers, available=32 * page)
    assert line_tokens(plain, planned(plain, layers, available=33 * page)) == 1056
    one, two = (budget.plain(served, ours, budget.Wanted(1024, n), 16, 32).needed for n in (1, 2))
    assert (one, two) == (33 * page, 65 * page)


BYTES = 32 << 20
PLANNED = {
    "a plain cache": ("Llama", "auto", ("--no-async-scheduling",)),
    "a plain cache in two batches": ("Llama", "auto", ()),
    "windows": ("Gemma-3", "kitty2", ("--no-async-scheduling",)),
    "windows in two batches": ("Gemma-3", "kitty2", ()),
    "windows of a plain cache": ("Gemma-3", "auto", ()),
    "larger heads": ("Gemma-4", "auto", ()),
    "chunks": ("Llama 4", "auto", ()),
    "a hybrid": ("Granite 4", "kitty2", ()),
    "a plain hybrid": ("Granite 4", "auto", ()),
}


def counted(engine: Any) -> int:
    """The tokens of vLLM's line."""
    return engine.engine.vllm_config.cache_config.kv_cache_size_tokens


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide if i else ()) for i, name in enumerate(PLANNED)]
)
def test_a_plan_is_what_a_real_engine_says(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`vllm-kvq plan` has the number of vLLM's own line, from config.json and the cache's bytes."""
    arch, dtype, flags = PLANNED[name]
    config = named(arch).build()
    config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]], "bfloat16"
    config.save_pretrained(where := tmp_path / "model")
    words = [str(where), "--cache-bytes", str(BYTES), "--context", "2048", "--skip-tokenizer-init", *flags]
    words += ["--max-num-batched-tokens", "512", "--formats", "kitty2"]
    assert cli.main(["plan", *words, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["caches"]}
    arguments = {"kv_cache_memory_bytes": BYTES, "max_model_len": 2048, "max_num_batched_tokens": 512}
    arguments |= {"async_scheduling": not flags, "dtype": "bfloat16", "load_format": "dummy"}
    arguments |= {"kv_cache_dtype": dtype, "skip_tokenizer_init": True}
    with EngineProcess(str(where), arguments, {}) as process:
        said = process.call(counted)
    assert rows["bf16" if dtype == "auto" else dtype]["vllm_tokens"] == said

"""The capacity of the start-up line compared with vLLM's own count, for every kind of configuration.

For windows vLLM counts more than requests keep; there a test fills a pool to prove that it holds what is announced
(tests/models/pool/test_pool.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import CASES
from engine_arguments import kvq
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from proof.demo.capacity import parse_capacity
from proof.models import named
from proof.models.draft import random_draft
from proof.oracle.engines.forked import EngineProcess
from vllm_kvq import cli
from vllm_kvq.eval.bits import bits_at
from vllm_kvq.integration.plan.plan import apply, plan
from vllm_kvq.integration.plan.served import Served
from vllm_kvq.integration.preview import budget
from vllm_kvq.integration.worker import report

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]
BLOCKS = 1000

# p packed, s skipped, w with a sliding window, m with a state, d a draft's
LAYERS = {
    "plain": "pp",
    "no sinks": "pp",
    "sinks": "pp",
    "option N": "pp",
    "a skipped layer": "ps",
    "vLLM's flag, two ranks": "ps",
    "ngram": "pp",
    "a draft model": "ppdd",
    "a draft with a skipped layer": "psd",
    "windows": "wwwwwp",
    "by layer": "pp",
}
"""The kinds of layers of each case, the model's and the draft's."""
SHORT = {"kv_cache_dtype": "kitty2", "max_model_len": 1024}
LONG = {"kv_cache_dtype": "squat2", "max_model_len": 2048, "max_num_batched_tokens": 128, "model": "Gemma-3"}
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "1k": (SHORT, "pp"),
    "1k, no sinks": ({**SHORT, **kvq(S=0)}, "pp"),
    "windows, no sinks": ({**LONG, **kvq(S=0)}, "wwwwwp"),
    "a hybrid, no sinks": (
        {"kv_cache_dtype": "squat2", "max_model_len": 2048, "model": "Granite 4", **kvq(S=0)},
        "mmpm",
    ),
    "a draft model, large blocks": (
        {"kv_cache_dtype": "squat2", "block_size": 1024, "max_model_len": 4096, "draft": "draft_model"},
        "ppdd",
    ),
    # a window takes what it sees, and tokens that are scheduled but not yet settled
    "windows in a long request": (LONG, "wwwwwp"),
    "windows over two stages": ({**LONG, "pipeline_parallel_size": 2}, "wwwwwp"),
    "windows and a skipped layer": (
        {**LONG, "numbers": {"num_hidden_layers": 12}, **kvq(skip_layers=[5])},
        "wwwwwswwwwwp",
    ),
    "larger heads in full layers": ({**LONG, "model": "Gemma-4"}, "wwwwwp"),
    "larger heads in a skipped layer, too": (
        {**LONG, "model": "Gemma-4", "numbers": {"num_hidden_layers": 18}, **kvq(skip_layers=[5])},
        "wwwwwswwwwwpwwwwwp",
    ),
    "smaller heads in full layers": ({**LONG, "model": "Gemma-4", "numbers": {"global_head_dim": 64}}, "wwwwwp"),
    "chunks": ({**LONG, "model": "Llama 4", "block_size": 64}, "wwwp"),
    # the other three layers of this model share caches, and vLLM's runner collects nothing from them
    "sharing layers": ({**LONG, "model": "Gemma-3n"}, "pwwp"),
    "a hybrid": ({"kv_cache_dtype": "squat2", "max_model_len": 2048, "model": "Granite 4"}, "mmpm"),
    "a hybrid, small pages": ({"kv_cache_dtype": "innerq2", "model": "Granite 4", "block_size": 32}, "mmpm"),
    "a hybrid without prefix caching": (
        {"kv_cache_dtype": "squat2", "model": "Granite 4", "enable_prefix_caching": False},
        "mmpm",
    ),
    "a hybrid with a skipped layer": (
        {
            "kv_cache_dtype": "squat2",
            "model": "Granite 4",
            "numbers": {"num_hidden_layers": 8, "layer_types": ["linear_attention", "full_attention"] * 4},
            "block_size": 32,
            **kvq(skip_layers=[1, 3]),
        },
        "msmsmpmp",
    ),
    "three kinds of layers": (
        {**LONG, "numbers": {"num_hidden_layers": 18}, **kvq(skip_layers=[5])},
        "wwwwwswwwwwpwwwwwp",
    ),
}
MIXED = {"kv_cache_dtype": "qjl3", "model": "Gemma-3", "max_num_batched_tokens": 128}


def gemma(layers: int, skip: list[int], m: dict[str, int]) -> dict[str, Any]:
    return {**MIXED, "numbers": {"num_hidden_layers": layers}, **kvq(m=m, S=8, skip_layers=skip)}


# Equally many pages of each size are a pattern for vLLM; for companions, without the layers that are not packed.
MORE |= {
    "by layer, the larger page first": (gemma(18, [], {"5": 512, "*": 128}), "wwwwwp" * 3),
    "by layer, equally many of each size": (gemma(24, [], {"5": 512, "17": 512, "*": 128}), "wwwwwp" * 4),
    "by layer, with skipped ones": (gemma(24, [23], {"5": 512, "*": 128}), "wwwwwp" * 3 + "wwwwws"),
    "by layer, with equally many skipped ones": (gemma(18, [5], {"11": 512, "*": 128}), "wwwwws" + "wwwwwp" * 2),
    "by layer, only companions are a pattern": (
        gemma(42, [5, 11, 17], {"23-34": 512, "*": 128}),
        "wwwwws" * 3 + "wwwwwp" * 4,
    ),
}
ALL = {name: (CASES[name][0], layers) for name, layers in LAYERS.items()} | MORE


def specs(vllm_config: Any, served: Served, kinds: str) -> dict[str, Any]:
    """What vLLM's model runner collects from the layers of a model whose weights are loaded."""
    from vllm.model_executor.layers.attention import Attention

    from vllm_kvq.integration.worker.backend import bound_backend
    from vllm_kvq.integration.worker.companions import SIDECAR_SUFFIX, SINK_SUFFIX, Sidecar, Sinks
    from vllm_kvq.integration.worker.layout import put_first, smallest_first
    from vllm_kvq.integration.worker.side_by_side import SideBySideBackend

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = {}
    for i, kind in enumerate(kinds):
        if kind == "m":
            found[f"layers.{i}.{kind}"] = state_spec(vllm_config)
            continue
        part = next((part for part in served.parts if i in part.layers), served.parts[0])
        of, how, arch = model, parallel, model.model_arch_config[i]
        if kind == "d":
            spec = vllm_config.speculative_config
            of, how = spec.draft_model_config, spec.draft_parallel_config
            arch = of.model_arch_config
        packed = bound_backend(part.format, served.recomputed, served.mixed)
        backend, heads = packed if kind == "p" else SideBySideBackend, of.get_num_kv_heads(how, arch)
        layer = SimpleNamespace(
            attn_type="decoder",
            kv_cache_dtype=vllm_config.cache_config.cache_dtype if kind == "p" else "auto",
            kv_cache_torch_dtype=of.dtype,
            sliding_window=(model.get_sliding_window() or model.attention_chunk_size) if kind == "w" else None,
            attn_backend=backend,
            num_kv_heads=heads,
            head_size=arch.head_size,
            head_size_v=arch.head_size,
        )
        spec, name = Attention.get_kv_cache_spec(layer, vllm_config), f"layers.{i}.{kind}"
        found[name] = backend.customize_spec(spec)
        if kind == "p":
            assert (part.slots.heads, part.slots.head_size) == (heads, arch.head_size)
            found[name + SIDECAR_SUFFIX] = Sidecar(part.format, part.slots, served).get_kv_cache_spec(vllm_config)
            if served.format.S:
                found[name + SINK_SUFFIX] = Sinks(part.format, part.slots, served).get_kv_cache_spec(vllm_config)
    put_first(next(name for name in found if name.endswith(".p")), found)
    for suffix in (SIDECAR_SUFFIX, SINK_SUFFIX):
        smallest_first([name for name in found if name.endswith(suffix)], found)
    return found


def state_spec(vllm_config: Any) -> Any:
    """The state of Mamba-2."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM as Granite
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    layer = SimpleNamespace(
        get_state_shape=lambda: Granite.get_mamba_state_shape_from_config(vllm_config),
        get_state_dtype=lambda: Granite.get_mamba_state_dtype_from_config(vllm_config),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
        is_kv_cache_tp_replicated=False,
    )
    return MambaBase.get_kv_cache_spec(layer, vllm_config)


def planned(vllm_config: Any, *ranks: dict[str, Any], available: int = 0) -> Any:
    """vLLM's plan of a worker's pool; each of `ranks` has its layers."""
    memory = [available] * len(ranks)
    if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is None:  # 0.32
        planning: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        return planning.get_kv_cache_configs(vllm_config, [*ranks], memory)[0]
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    groups = planning.get_global_kv_cache_groups(vllm_config, [*ranks])
    return planning.get_kv_cache_configs(vllm_config, [*ranks], memory, groups)[0]


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
    if {"w", "m"} & {*kinds}:  # vLLM counts for each request what only one at a time takes of windows and states
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


STAGES = ({"kv_cache_dtype": "kitty2", "max_model_len": 1024, "pipeline_parallel_size": 2}, "pp")
ON_PAPER = {
    **{name: ALL[name] for name in ("plain", "no sinks", "1k", "vLLM's flag, two ranks", "a draft model", "by layer")},
    **{name: ALL[name] for name in ("windows in a long request", "a hybrid", "three kinds of layers")},
    "two stages": STAGES,
}
CACHE_BYTES = 300 << 20


@pytest.mark.parametrize("case", ON_PAPER)
def test_a_plan_on_paper_is_vllms(case: str, bare: Bare) -> None:
    """`vllm-kvq plan` counts the tokens of a cache of given bytes as vLLM does that gets these bytes: to one page."""
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
            # MambaMixer2 has a state more, which patches/states.py takes away where we serve
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

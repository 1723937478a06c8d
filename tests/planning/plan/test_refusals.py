"""What can't be served is refused at start-up, with one sentence that names the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from engine_arguments import kvq

from vllm_kvq.integration.plan import memory
from vllm_kvq.integration.plan.drafts import draft_problem
from vllm_kvq.integration.plan.model import weights
from vllm_kvq.problem import Problem, Refused

pytestmark = pytest.mark.engine


def config(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"kv_cache_dtype": "squat2", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 30}
    return EngineArgs(model=str(model), **{**defaults, **arguments}).create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (kvq(rank=3), "unknown kvq option 'rank'; known options are keys, values"),
        (kvq(r=99), "option 'r' is 99; it takes a whole number from 1 to 64"),
        (kvq(m=256), "option 'm' is not read by squat2"),
        (
            kvq(rope="before"),
            "option 'rope' is served only as 'after'; keys before RoPE are for vllm_kvq.roundtrip",
        ),
        (kvq(W_keys=0), "option 'W_keys' is served only as large as W, 32; a shorter window of keys"),
        (kvq(token_scale="balanced"), "option 'token_scale' is served only as 'none'"),
        (kvq(keys="innerq", quant_mode="hybrid_prefill"), "option 'quant_mode' is not served as 'hybrid_prefill'"),
        (kvq(g=1), "option 'g' is served in multiples of 16; finer blocks are only for vllm_kvq.roundtrip"),
        (kvq(r=64), "option 'r' is 64; a subspace of 64 channels is no more than 63 wide"),
        (kvq(g=64), "option 'g' is 64, the whole head of 64 channels"),
        (kvq(N=64) | {"block_size": 128}, "kvq option 'N' is 64 but --block-size is 128"),
        ({"additional_config": {"kvq": 3}}, "additional config 'kvq' is 3; it must be an object"),
        (kvq(skip_layers=[2]), "option 'skip_layers' names layer 2; the model has layers 0 to 1"),
        (kvq(skip_layers=[-3]), "option 'skip_layers' names layer -3; the model has layers 0 to 1 (-1 to -2 counted"),
        (
            {"kv_cache_dtype_skip_layers": ["2"]},
            "--kv-cache-dtype-skip-layers names layer 2; the model has layers 0 to 1",
        ),
        ({"kv_cache_dtype": "e4m3_calibrated"}, "e4m3_calibrated has constants that are fitted to the tensors of a"),
        ({"block_size": 48}, "block size 48 is not a multiple of 32; use --block-size 128"),
        ({"block_size": 1536}, "block size 1536 is too large; the largest is 1024"),
        # options that nothing would read
        (
            {"additional_config": {"r": 8}},
            "kvq option 'r' is outside 'kvq'; write --additional-config '{\"kvq\": {",
        ),
        ({"additional_config": {"KVQ": {"r": 8}}}, "additional config 'KVQ' is not read; put options under 'kvq'"),
        ({"additional_config": {"KVQ": {"r": 8}}, "kv_cache_dtype": "auto"}, "additional config 'KVQ' is not read"),
        (kvq(r=8) | {"kv_cache_dtype": "auto"}, "kvq options are given, and --kv-cache-dtype auto reads none of them"),
        (kvq(r=8) | {"kv_cache_dtype": "fp8"}, "kvq options are given, and --kv-cache-dtype fp8 reads none of them"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "does not support the KV connector ExampleConnector, which has one block table per request, where packed "
            "layers have several, and copies single tokens by their slots, which packed pages do not have; drop ",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "which takes only vLLM's own kinds of layers, and sinks are another kind; drop --kv-transfer-config",
        ),
        (
            {"kv_offloading_size": 0.1},
            "drop --kv-transfer-config and --kv-offloading-size: SimpleCPUOffloadConnector copies only on GPUs",
        ),
        (
            {"kv_offloading_size": 0.1, "kv_offloading_backend": "lmcache"},
            "does not support --kv-offloading-backend lmcache; drop --kv-transfer-config and --kv-offloading-size, or "
            "use SimpleCPUOffloadConnector",
        ),
        ({"prefix_match_unit": 16}, "does not support --prefix-match-unit"),
    ],
)
def test_configuration_is_refused(model: Path, arguments: dict[str, Any], sentence: str) -> None:
    from vllm.config import KVTransferConfig

    if "kv_transfer_config" in arguments:
        arguments = {"kv_transfer_config": KVTransferConfig(**arguments["kv_transfer_config"])}
    with pytest.raises(Refused) as caught:
        config(model, **arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)  # nothing before or after the sentence, such as pydantic's words


def test_other_plugins_options_are_left_alone(model: Path) -> None:
    for dtype in ("squat2", "auto"):
        config(model, additional_config={"another plugin": {"r": 8}}, kv_cache_dtype=dtype)


def test_the_sentence_comes_first_in_python(model: Path) -> None:
    from vllm import LLM

    with pytest.raises(Refused) as caught:
        LLM(model=str(model), kv_cache_dtype="squat2", max_model_len=256, **kvq(r=99))
    assert str(caught.value).startswith("option 'r' is 99; it takes a whole number from 1 to 64")


@pytest.mark.parametrize(
    ("method", "arguments", "sentence"),
    [
        ("dflash", {}, "does not support speculative decoding with method 'dflash'; use one of ngram"),
    ],
)
def test_draft_is_refused(model: Path, tmp_path: Path, method: str, arguments: dict[str, Any], sentence: str) -> None:
    from proof.models.draft import random_draft

    head = random_draft(tmp_path / "draft", model, method="eagle3" if method == "dflash" else "draft_model")
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 2}
    with pytest.raises(Refused) as caught:
        config(model, speculative_config=speculative, **arguments)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "dtype", "what"),
    [
        ({}, None, None),
        ({}, "squat2", "a low-bit cache for the draft"),
        ({"use_mla": True}, None, "drafts with latent attention (MLA)"),
        ({"get_sliding_window": lambda: 64}, None, "drafts with sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None, "drafts with sliding-window attention"),
        ({"layer_types": ["full_attention"] * 2}, None, None),
    ],
)
def test_drafts_whose_cache_is_another(draft: dict[str, Any], dtype: str | None, what: str | None) -> None:
    """As far as their configuration says."""
    made = {"use_mla": False, "get_sliding_window": lambda: None} | draft
    target = SimpleNamespace(**made, hf_text_config=SimpleNamespace(layer_types=made.pop("layer_types", None)))
    spec = SimpleNamespace(method="draft_model", kv_cache_dtype=dtype, draft_model_config=target)
    found = draft_problem(SimpleNamespace(speculative_config=spec))  # type: ignore[arg-type]
    assert (None if found is None else found.what) == what


def test_memory_that_is_not_free(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default is most of the machine's memory, whatever else uses it."""
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(100 << 30, 9 << 30))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    memory._problem.cache_clear()
    with pytest.raises(Refused) as caught:
        config(model, kv_cache_memory_bytes=None)
    assert str(caught.value) == (
        "vLLM would take 92% of this machine's memory (92.0 GiB), but 9.0 GiB of 100.0 GiB are free; "
        "set a limit, for example --kv-cache-memory-bytes 4G"
    )
    config(model)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config(model, kv_cache_memory_bytes=None)
    memory._problem.cache_clear()


def test_weights_that_do_not_fit_next_to_the_caches(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would kill the server while it loads them. Each rank has a cache, all of them the weights once, and
    float32 is loaded in the dtype that is served."""
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(100 << 30, 9 << 30))
    monkeypatch.setattr(memory, "checkpoint_bytes", lambda model: 12 << 30)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    memory._problem.cache_clear()
    config(model, kv_cache_memory_bytes=3 << 30, dtype="bfloat16")
    for given in ({"kv_cache_memory_bytes": 4 << 30}, {"kv_cache_memory_bytes": 2 << 30, "tensor_parallel_size": 2}):
        with pytest.raises(Refused) as caught:
            config(model, dtype="bfloat16", **given)
        assert str(caught.value) == (
            "6.0 GiB of weights and 4.0 GiB of cache do not fit, because 9.0 GiB of 100.0 GiB are free; "
            "give the cache less with --kv-cache-memory-bytes, or serve a smaller model"
        )
    memory._problem.cache_clear()


def test_weights_are_those_of_all_shards(tmp_path: Path) -> None:
    """And of one kind of file, where a checkpoint has two."""
    for name, size in (("model-1.safetensors", 300), ("model-2.safetensors", 200), ("pytorch_model.bin", 700)):
        (tmp_path / name).write_bytes(bytes(size))
    assert weights.weight_bytes(tmp_path) == 500


def test_option_n_sets_the_block_size(model: Path) -> None:
    assert config(model, **kvq(N=64)).cache_config.block_size == 64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--kv-cache-dtype", "squat9"], "invalid choice: 'squat9'", marks=pytest.mark.wide),
        (
            ["--kv-cache-dtype", "qjl3", "--additional-config", '{"kvq": {"m": 100}}'],
            "vllm-kvq: option 'm' is 100; it takes a whole number from 32 to 2048, a multiple of 32",
        ),
    ],
)
def test_command_line_says_one_sentence(model: Path, arguments: list[str], sentence: str) -> None:
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode != 0
    if "squat9" in arguments and not vllm.__version__.startswith("0.32."):
        assert "squat9" in done.stderr  # vLLM's own message, of several lines since 0.33
        return
    last = done.stderr.strip().splitlines()[-1]
    assert sentence in last
    assert "Traceback" not in done.stderr


def test_missing_companion_is_an_error_and_never_a_plain_run() -> None:
    from vllm_kvq.integration.worker.backend import KVQImpl, KVQMetadata

    impl = object.__new__(KVQImpl)
    impl.packed = impl.sharing = None
    x = torch.zeros(1, 1, 64)
    step = KVQMetadata(start := torch.tensor([0, 1]), start, torch.tensor([1]), torch.zeros(1, 1), 1)
    with pytest.raises(RuntimeError, match="sidecar companion of this layer is missing"):
        impl.forward(None, x, x, x, torch.zeros(1), step, x)


def test_unpacked_slabs_are_recognised() -> None:
    from vllm_kvq.formats import FORMATS, Geometry

    fmt = FORMATS["squat2"].bind(Geometry(64, 64))
    pages = torch.zeros(2, 1, fmt.record_bytes, dtype=torch.uint8)
    k, v = (fmt.widen(torch.randn(1, 32, 64))[0] for _ in range(2))
    fmt.write(pages, torch.tensor([1]), torch.tensor([0]), fmt.pack(k, v, None))
    assert fmt.packed_slabs(pages, torch.tensor([1, 0])).tolist() == [[True, False], [False, False]]


def test_a_problem_names_the_way_out() -> None:
    assert str(Problem("no room", "use less")) == "no room; use less"
    for what, instead in (("no room", ""), ("", "use less")):
        with pytest.raises(ValueError, match="what is wrong and what to do instead"):
            Problem(what, instead)

"""`vllm-kvq plan`: what a machine that is not here would hold, from a folder that has only config.json."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, OPTConfig, Qwen2Config
from vllm.engine.arg_utils import human_readable_int

from proof.models import named
from vllm_kvq import cli
from vllm_kvq.cli.arguments import size
from vllm_kvq.cli.check.words import wrong_words
from vllm_kvq.formats.table import public_formats

pytestmark = pytest.mark.engine
GIB = 1 << 30
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
Planned = Callable[..., Any]


@pytest.fixture(autouse=True)
def loud_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command makes its own process quiet; here it is the tests' process."""
    for variable in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.delenv(variable, raising=False)
    levels = {name: logging.getLogger(name).level for name in ("vllm", "transformers")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    def go(*arguments: str, where: Path = folder, status: int = 0) -> Any:
        assert cli.main(["plan", str(where), *arguments, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return go


def caches(document: Any) -> dict[str, Any]:
    return {row["name"]: row for row in document["caches"]}


def test_every_format_and_vllms_own(planned: Planned) -> None:
    found = planned("--cache-bytes", "1G", "--context", "4096")
    rows = caches(found)
    assert [*rows][:2] == ["bf16", "fp8"]
    assert {*rows} - {"bf16", "fp8"} == {fmt.name for fmt in public_formats()}
    # 4 layers, keys and values of 4 heads of 128 in 2 bytes
    assert rows["bf16"]["request_bytes"] == 4096 * 4 * 2 * 4 * 128 * 2
    assert rows["bf16"]["tokens"] == GIB // (4 * 2 * 4 * 128 * 2)
    assert rows["fp8"]["tokens"] == 2 * rows["bf16"]["tokens"]
    assert rows["bf16"]["token_bytes"] == 4 * 2 * 4 * 128 * 2
    assert rows["kitty2"]["bits"] == pytest.approx(16 * rows["kitty2"]["request_bytes"] / rows["bf16"]["request_bytes"])
    assert rows["kitty2"]["kl"] < rows["kivi2"]["kl"]


def test_the_memory_of_a_gpu(planned: Planned) -> None:
    """Weights are counted: embeddings, four layers, the head."""
    found = planned("--gpu-memory", "8G", "--formats", "kitty2")
    layer = 1024 * 1024 * 2 + 2 * 1024 * 512 + 3 * 1024 * 2048 + 2 * 1024
    weights = 2 * (2 * 1000 * 1024 + 4 * layer + 1024)
    share = float(found["memory"].partition("%")[0]) / 100
    assert found["cache_bytes"] == int(8 * GIB * share) - weights - GIB
    assert "counted from the configuration" in found["memory"]
    said = planned("--gpu-memory", "8G", "--formats", "kitty2", "--weights", "3G")
    assert said["cache_bytes"] == int(8 * GIB * share) - 4 * GIB


def test_ranks_share_heads_and_layers(planned: Planned) -> None:
    one, heads, layers = (
        caches(planned("--cache-bytes", "1G", "--concurrency", "64", "--formats", "kitty2", *ranks))
        for ranks in ((), ("--tp", "2"), ("--pp", "2"))
    )
    for name in ("bf16", "kitty2"):
        for shared in (heads, layers):
            assert shared[name]["token_bytes"] == pytest.approx(one[name]["token_bytes"] / 2, rel=0.02)
            assert shared[name]["request_bytes"] == pytest.approx(one[name]["request_bytes"] / 2, rel=0.02)
            assert shared[name]["tokens"] == pytest.approx(2 * one[name]["tokens"], rel=0.02)
            assert shared[name]["needed"] == pytest.approx(one[name]["needed"] / 2, rel=0.02)


def test_the_pages_that_are_asked_for(planned: Planned) -> None:
    """In both forms of the flag; a GPU's own pages have 64 tokens."""
    flags = ("--gpu-memory", "8G", "--formats", "kitty2")
    usual, *asked = (
        caches(planned(*flags, *more))["kitty2"]["request_bytes"]
        for more in ((), ("--block-size", "128"), ("--block-size=128",))
    )
    assert asked[0] == asked[1] != usual


def test_ranks_share_the_weights(planned: Planned) -> None:
    flags = ("--gpu-memory", "8G", "--weights", "4G", "--formats", "kitty2")
    one, two = (planned(*flags, "--tp", ranks)["cache_bytes"] for ranks in "12")
    assert two - one == 2 * GIB


def test_windows_take_less_once_a_prompt_is_computed(planned: Planned, tmp_path: Path) -> None:
    """So do those of vLLM's own cache: the second request adds what it keeps."""
    config = named("Gemma-3").build()
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(where := tmp_path / "gemma")
    flags = ("--formats", "kitty2", "--context", "2048", "--max-num-batched-tokens", "1024")
    one, two = (caches(planned(*flags, "--concurrency", n, where=where)) for n in "12")
    for name in ("bf16", "fp8", "kitty2"):
        assert two[name]["needed"] - one[name]["needed"] < one[name]["request_bytes"]


def test_vllms_own_line(planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it says something else than the plan, the table says so, and why."""
    config = named("Gemma-3").build()
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(where := tmp_path / "gemma")
    flags = ("--formats", "kitty2", "--context", "2048", "--max-num-batched-tokens", "1024", "--cache-bytes", "64M")
    rows = caches(planned(*flags, where=where))
    assert all(row["vllm_tokens"] < row["tokens"] for row in rows.values())
    assert cli.main(["plan", str(where), *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    lines = ", ".join(f"{name} {row['vllm_tokens']:,}" for name, row in rows.items())
    assert f"vLLM's own line 'KV cache size' will say {lines}, because it counts for every request all that" in said
    assert "that windows take while a prompt is computed" in said


def test_a_dense_model_needs_no_footnote(planned: Planned, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--formats", "kitty2", "--cache-bytes", "1G")
    assert all(row["vllm_tokens"] == row["tokens"] for row in caches(planned(*flags)).values())
    assert cli.main(["plan", str(folder), *flags]) == 0
    assert "vLLM" not in capsys.readouterr().out
    assert caches(planned("--formats", "kitty2"))["kitty2"]["vllm_tokens"] is None


def test_vllm_keeps_a_block(planned: Planned, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 blocks of 128 tokens hold no request of 8,192."""
    flags = ("--formats", "kitty2", "--cache-bytes", "64M", "--block-size", "128")
    bf16 = caches(planned(*flags))["bf16"]
    assert (bf16["tokens"], bf16["vllm_tokens"]) == (8064, None)
    assert cli.main(["plan", str(folder), *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "bf16: vLLM will not start, because no request of 8,192 tokens fits next to the block" in said


def test_blocks_of_a_plain_cache(planned: Planned) -> None:
    """On a GPU they have 16 tokens, or what the flag says: a request takes whole ones."""
    flags = ("--gpu-memory", "8G", "--formats", "kitty2", "--context", "8130")
    usual, asked = (caches(planned(*flags, *more))["bf16"]["request_bytes"] for more in ((), ("--block-size", "128")))
    token = 4 * 2 * 4 * 128 * 2
    assert (usual // token, asked // token) == (8144, 8192)


def test_a_block_size_in_a_file(planned: Planned, tmp_path: Path) -> None:
    """It counts as much as the flag does, in every row; the flag wins if both are given."""
    file = tmp_path / "serve.yaml"
    file.write_text("block-size: 128\n")

    def blocks(*more: str) -> dict[str, int]:
        rows = caches(planned("--formats", "kitty2", "--context", "8130", *more))
        return {name: row["request_bytes"] for name, row in rows.items()}

    for memory in (("--gpu-memory", "8G"), ("--cache-bytes", "1G")):
        there, flag = blocks(*memory, "--config", str(file)), blocks(*memory, "--block-size", "128")
        underscores = blocks(*memory, "--block_size", "128")
        assert there == flag == underscores
    wins = blocks("--cache-bytes", "1G", "--config", str(file), "--block-size", "64")
    assert wins == blocks("--cache-bytes", "1G", "--block-size", "64") != flag


def test_ranks_in_a_file(planned: Planned, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan would count one rank; the format and the memory that a server's file has do no harm."""
    file = tmp_path / "serve.yaml"
    file.write_text("tensor-parallel-size: 2\nkv-cache-dtype: kitty2\nkv-cache-memory-bytes: 4G\n")
    flags = ("--formats", "kitty2", "--config", str(file))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", str(folder), *flags])
    assert stopped.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"in {file}, --tensor-parallel-size is 2, which is --tp here; add --tp 2" in said
    assert caches(planned(*flags, "--tp", "2")) == caches(planned("--formats", "kitty2", "--tp", "2"))


def test_what_is_refused_and_why(planned: Planned, tmp_path: Path) -> None:
    """A model without RoPE: the other format is planned all the same."""
    OPTConfig(
        architectures=["OPTForCausalLM"], hidden_size=512, num_attention_heads=8, num_hidden_layers=2, vocab_size=1000,
        ffn_dim=1024, max_position_embeddings=2048, word_embed_proj_dim=512, dtype="bfloat16",
    ).save_pretrained(where := tmp_path / "opt")  # fmt: skip
    found = planned("--formats", "polar4,kitty2", "--cache-bytes", "64M", where=where)
    assert [*caches(found)] == ["bf16", "fp8", "kitty2"]
    assert [*found["refused"]] == ["polar4"]
    assert "RoPE" in found["refused"]["polar4"]
    assert "'pairing'" in found["refused"]["polar4"]
    assert [*found["times_bf16_by_context"]] == ["kitty2"]
    only_polar = planned("--formats", "polar4", where=where, status=1)
    assert f"{only_polar['error']}; {only_polar['instead']}" == found["refused"]["polar4"]


def test_what_the_requests_need_holds_them(planned: Planned) -> None:
    needed = caches(planned("--concurrency", "50", "--formats", "polar4"))["polar4"]["needed"]
    fits, lacks = (
        caches(planned("--cache-bytes", str(nbytes), "--formats", "polar4"))["polar4"]["tokens"]
        for nbytes in (needed, needed - needed // 25)
    )
    assert lacks < 50 * 8192 <= fits


def test_a_model_with_key_biases_is_known_by_its_type(planned: Planned, tmp_path: Path) -> None:
    Qwen2Config(architectures=["Qwen2ForCausalLM"], **SHAPE).save_pretrained(where := tmp_path / "qwen")
    found = planned("--formats", "innerq2", where=where)
    assert "large key biases" in found["kl_measured_on"]
    assert "no large" not in found["kl_measured_on"]
    assert caches(found)["innerq2"]["kl"] > 1


def test_no_kernel_is_compiled(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop without a compiler can plan, at once."""
    wishes: list[str] = []
    module = importlib.import_module("vllm_kvq.integration.plan.plan")
    path_for = module.path_for
    monkeypatch.setattr(
        module, "path_for", lambda fmt, wish, capped: wishes.append(wish.kernels) or path_for(fmt, wish, capped)
    )
    planned("--formats", "kitty2")
    assert {*wishes} == {"torch"}


def test_what_no_format_serves(planned: Planned, folder: Path) -> None:
    """One sentence, although every format was asked."""
    found = planned("--tp", "3", status=1)
    assert found["error"].count("8") >= 1
    assert "3" in found["error"]


def test_nothing_is_left(planned: Planned) -> None:
    assert "use more GPUs with --tp" in planned("--gpu-memory", "1G", "--formats", "kitty2", status=1)["instead"]


def test_a_table_and_a_plot(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--cache-bytes", "1G", "--concurrency", "8", "--formats", "kitty2,polar4", "--out", str(out)]
    assert cli.main(["plan", str(folder), *arguments]) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines() if line.startswith(("cache ", "bf16", "kitty2")))
    assert "GiB for" in printed
    assert re.search(r"^bf16 +16\.00 +8,192 +64\.0 ", printed, re.M)  # bytes a token, MiB a request of 8,192
    document = json.loads((out / "plan.json").read_text())
    times = document["times_bf16_by_context"]["kitty2"]
    assert times["256"] < times["8192"]
    assert (out / "plan.png").stat().st_size > 10_000


def test_a_large_model_fits_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {"num_hidden_layers": 80, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    LlamaConfig(architectures=["LlamaForCausalLM"], **{**SHAPE, **large}).save_pretrained(tmp_path)
    longest = max((fmt.name for fmt in public_formats()), key=len)
    arguments = ["--cache-bytes", "288G", "--concurrency", "1000", "--formats", f"kitty2,{longest}"]
    assert cli.main(["plan", str(tmp_path), *arguments]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("cache ", "bf16", longest))]
    assert max(map(len, table)) <= 80
    assert any(re.match("bf16 +16.00 +327,680 ", line) for line in table)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu-memory", "80X"), "'80X' is not a size such as 80G or 512M"),
        (("--context", "0"), "argument --context: 0 is below 1"),
        (("--formats", "kity2"), "did you mean 'kitty2'?"),
        (("--gpu-memory", "80G", "--cache-bytes", "4G"), "not allowed with argument"),
        (("--weights", "3G"), "--weights is subtracted from --gpu-memory, which is not given"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size is --tp here"),
        (("--kv-cache-memory-bytes=4G",), "--kv-cache-memory-bytes is --cache-bytes here"),
    ],
)
def test_bad_input(folder: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", str(folder), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80G", 80 * GIB), (" 3M ", 3 << 20), ("512m", 512 * 10**6), ("1.5g", 1_500_000_000), ("25.6k", 25_600), ("7", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == human_readable_int(text) == nbytes
    assert wrong_words(["M", "--kv-cache-memory-bytes", text], {}) is None


@pytest.mark.parametrize("text", ["1.5G", "1.5GiB", "80GB", "80 G", "80X", "1.5", "much", ""])
def test_sizes_that_vllm_does_not_take(text: str) -> None:
    for parse in (size, human_readable_int):
        with pytest.raises((ValueError, argparse.ArgumentTypeError)):
            parse(text)
    problem = wrong_words(["M", "--kv-cache-memory-bytes", text], {})
    assert (problem or "").startswith(f"--kv-cache-memory-bytes is {text or 'empty'}; write it as in")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1.5G", "has a fraction, which K, M, G and T, the powers of 1024, do not take"),
        ("0", "must be greater than zero"),
    ],
)
def test_what_is_said_of_sizes(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        size(text)

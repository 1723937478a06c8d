"""docs/scaling.md's numbers are those that `vllm-kvq plan` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from vllm_kvq import cli
from vllm_kvq.formats.table import DEFAULT_N

pytestmark = pytest.mark.engine
PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
CONTEXT, GPUS, PLAIN_BLOCK = 32768, 1000, 16
Row = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Llama-3.1-70B."""
    where = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        dtype="bfloat16", tie_word_embeddings=False,
    ).save_pretrained(where)  # fmt: skip
    return where


def rows(first: str) -> dict[str, list[str]]:
    """The table whose first column has this title."""
    (table,) = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.M)
    lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines}


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Row:
    words = ["plan", str(folder), "--gpu-memory", "80G", "--context", str(CONTEXT), *more, "--json"]
    assert cli.main(words) == 0
    return json.loads(capsys.readouterr().out)


def caches(document: Row) -> dict[str, Row]:
    return {row["name"]: row for row in document["caches"]}


def test_how_many_gpus_to_a_server(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = rows("`--tp`")
    assert len(table) == 4
    for ranks, said in table.items():
        document = planned(folder, capsys, "--formats", "kitty2", "--tp", ranks)
        bf16, kitty2 = (caches(document)[name]["tokens"] / CONTEXT for name in ("bf16", "kitty2"))
        want = (document["cache_bytes"] / 2**30, bf16, kitty2, kitty2 / int(ranks))
        assert said == [f"{number:.1f}" for number in want], ranks
    split, whole = (
        caches(planned(folder, capsys, "--formats", "kitty2", *ranks))["kitty2"]["tokens"]
        for ranks in (("--tp", "4", "--pp", "2"), ("--tp", "8"))
    )
    assert split == whole


def test_a_thousand_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, ranks = rows("cache"), 8
    formats = [name for name in table if name not in ("bf16", "fp8")]
    more = ("--formats", ",".join(formats), "--concurrency", "40", "--tp", str(ranks))
    assert " ".join(more[:4]) in PAGE
    found = caches(planned(folder, capsys, *more))
    assert set(found) == set(table)
    for name, said in table.items():
        row, servers = found[name], GPUS // ranks
        requests, tokens = row["tokens"] / CONTEXT, servers * row["tokens"] / 1e6
        block = DEFAULT_N if name in formats else PLAIN_BLOCK
        assert said == [
            f"{row['request_bytes'] * ranks / CONTEXT / 1024:.1f}",
            f"{requests:.1f}",
            f"{servers * requests:,.0f}",
            f"{tokens:,.0f}",
            f"{tokens / block:.1f}",
            f"{row['needed'] / 2**30:.1f}",
        ], name

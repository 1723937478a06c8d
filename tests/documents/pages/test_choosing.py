"""docs/choosing.md: how many times as many tokens fit, for every row of its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from proof.pictures.speeds.capacity import SHAPE
from vllm_kvq.eval.choice import choices
from vllm_kvq.formats.table import suite

pytestmark = pytest.mark.engine
PAGE = Path(__file__).parents[3] / "docs" / "choosing.md"
LENGTHS = (1024, 4096, 32768, 131072)
LEFT_OUT = {"polar4_v16"}
"""A public format that exists only to be compared with its paper."""


def rows() -> dict[str, list[float]]:
    """By label, as --formats takes it."""
    text = PAGE.read_text(encoding="utf-8").partition("## By context")[2].partition("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `.*\|$", text, re.M):
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        options = re.findall(r"`(\w+): (\w+)`", names)
        labels = [":".join(filter(None, (name, ",".join(f"{k}={v}" for k, v in options))))
                  for name in re.findall(r"`(\w+)`", names)]  # fmt: skip
        found |= {key: [float(cell) for cell in cells] for key in labels}
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("label", rows())
def test_a_row(label: str, llama: Path) -> None:
    from vllm_kvq.integration.preview.budget import times_plain
    from vllm_kvq.integration.preview.dry_start import dry_start

    (choice,) = choices(label)
    flags = ["--kv-cache-dtype", choice.format, "--kv-cache-memory-bytes", "1M", "--block-size", "128"]
    flags += ["--additional-config", json.dumps({"kvq": dict(choice.options)})] if choice.options else []
    served = dry_start([str(llama), *flags]).served
    assert [round(times_plain(served, length), 1) for length in LENGTHS] == rows()[label]


def test_no_public_format_is_forgotten() -> None:
    plain = {label for label in rows() if ":" not in label}
    assert {*suite("public")} - plain <= LEFT_OUT

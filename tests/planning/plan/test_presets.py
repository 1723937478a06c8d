"""configs/presets: each starts, and is what the recorded results say of it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_kvq import FORMATS
from vllm_kvq.eval.results.statistics import ALPHA, mcnemar
from vllm_kvq.formats.budgets import BUDGETS

yaml = pytest.importorskip("yaml", reason="comes with vLLM")
pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]
PRESETS = ROOT / "configs" / "presets"
RESULTS = ROOT / "docs" / "results" / "quality"
Row = dict[str, str]


def measured(context: int | str) -> list[dict[str, Row]]:
    """The rows of each real model, by format; only ours."""
    found = [rows_of(path) for path in sorted(RESULTS.glob(f"real-*-{context}.csv"))]
    assert len(found) == 4, "the four models of docs/quality.md"
    return found


def with_klt(context: int) -> list[dict[str, Row]]:
    """And those of transform coding, which has files of its own."""
    paths = sorted(RESULTS.glob(f"real-*-{context}.csv"))
    klt = [path.with_stem(f"{path.stem}-klt") for path in paths]
    more = [rows_of(path) if path.exists() else {} for path in klt]
    assert sum(map(bool, more)) >= 3
    return [rows | own for rows, own in zip(measured(context), more, strict=True)]


def rows_of(path: Path) -> dict[str, Row]:
    with path.open(encoding="utf-8") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    return {name: rows[name] for name in rows if name in FORMATS and FORMATS[name].public}


def kl(row: Row) -> float:
    return float(row["kl"])


def bits(row: Row) -> tuple[float, float]:
    """In pages, and over a request."""
    return float(row["page_bits"]), float(row["bits"])


def many_users(name: str) -> bool:
    models = with_klt(1024)
    formats = {label for rows in models for label in rows}
    good = {label for label in formats if all(kl(rows[label]) <= 0.03 for rows in models if label in rows)}
    fewest = [min(bits(rows[label]) for label in good & rows.keys()) for rows in models]
    return [bits(rows[name]) for rows in models if name in rows] == fewest


def long_context(name: str) -> bool:
    better: set[str] | None = None
    for rows in measured("4096-klt"):
        small = {f for f, row in rows.items() if float(row["page_bits"]) <= 4.6 and row["claim_kl_verdict"] == "better"}
        better = small if better is None else better & small
    return better == {BUDGETS[name].formats[0]}


def best_quality(name: str) -> bool:
    found = [rows for rows in with_klt(1024) if name in rows]
    least = len(found) >= 3 and all(kl(rows[name]) <= 4 / 3 * min(map(kl, rows.values())) for rows in found)
    return least and solves_as_many(name)


def solves_as_many(name: str) -> bool:
    """As many of HumanEval's problems as a 16-bit cache, within chance."""
    with (RESULTS / "humaneval-qwen2.5-0.5b.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ours, plain = ([row["passed"] == "True" for row in rows if row["format"] == label] for label in (name, "auto"))
    assert len(ours) == len(plain) == 164
    return mcnemar(ours, plain) > ALPHA


RULES: dict[str, Callable[[str], bool]] = {
    "many-users": many_users,
    "long-context": long_context,
    "best-quality": best_quality,
}


def test_every_preset_has_a_rule() -> None:
    assert {path.stem for path in PRESETS.iterdir()} == RULES.keys()


@pytest.mark.parametrize("preset", RULES)
def test_a_preset_is_what_was_measured(preset: str) -> None:
    text = (PRESETS / f"{preset}.yaml").read_text()
    assert f"vllm serve MODEL --config configs/presets/{preset}.yaml" in text
    name = yaml.safe_load(text)["kv-cache-dtype"]
    assert RULES[preset](name)
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert re.findall(rf"configs/presets/{preset}\.yaml +# (\w+)$", choosing, re.MULTILINE) == [name]


@pytest.mark.parametrize("preset", RULES)
def test_a_preset_serves(preset: str, model: Path) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from proof.oracle.engines.forked import EngineProcess
    from proof.oracle.trace import Request, Trace

    arguments = FlexibleArgumentParser().load_config_file(str(PRESETS / f"{preset}.yaml"))
    assert arguments[::2] == ["--kv-cache-dtype"]
    with EngineProcess(str(model), {"kv_cache_dtype": arguments[1], "max_model_len": 512}, {}) as process:
        result = process.run(Trace((Request("one", tuple(range(8, 400)), 4),)))
    assert [len(tokens) for tokens in result.outputs["one"]] == [4]

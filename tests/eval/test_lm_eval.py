"""Tasks of lm-evaluation-harness: a stand-in for it writes what it would; the real one runs where it is installed."""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq import cli
from vllm_kvq.cli.eval import lm_eval as lm_command
from vllm_kvq.eval import lm_tasks
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.lm_tasks import LmEval, LmEvalFailed, rows
from vllm_kvq.eval.results.result import DECODING, TEACHER_FORCED, Results

SHAPE = {"hidden": 128, "dtype": "bfloat16"}
FOUND: dict[str, Any] = {
    "results": {
        "sums": {"alias": "sums", "sample_len": 40, "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.05,
                 "exact_match,loose": 0.75, "exact_match_stderr,loose": "N/A"},
        "choices": {"alias": "choices", "acc,none": 0.25, "acc_stderr,none": 0.1},
        "both": {"alias": "both", "acc,none": 0.4, "acc_stderr,none": 0.1},
    },
    "configs": {"sums": {"output_type": "generate_until"}, "choices": {"output_type": "multiple_choice"}},
    "n-samples": {"sums": {"original": 90, "effective": 40}, "choices": {"original": 20, "effective": 20}},
}  # fmt: skip

STAND_IN = """
import json, pathlib, sys
assert sys.argv[1:3] == ["run", "--config"]
configuration = json.loads(pathlib.Path(sys.argv[3]).read_text())
with open({asked!r}, "a") as file:
    file.write(json.dumps(configuration) + "\\n")
if configuration["model_args"]["kv_cache_dtype"] == "fp8":
    print("a traceback")
    sys.exit("this processor has no fp8")
out = pathlib.Path(configuration["output_path"], "a_model")
out.mkdir(parents=True)
(out / "results_2026.json").write_text({found!r})
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the stand-in writes what it was told."""
    package = tmp_path / "stand_in" / "lm_eval"
    package.mkdir(parents=True)
    log = tmp_path / "asked"
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN.format(asked=str(log), found=json.dumps(FOUND)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setattr(lm_tasks, "find_spec", lambda name: object())
    monkeypatch.setattr(lm_command, "version", lambda name: "0")
    return log


def test_a_row_for_each_figure() -> None:
    found = list(rows(FOUND, "model", Choice("squat2", {"r": 8}), 2048, 3.2))
    assert [(r.task, r.regime, r.sequences) for r in found] == [
        ("sums: exact_match, strict", DECODING, 40),
        ("sums: exact_match, loose", DECODING, 40),
        ("choices: acc", TEACHER_FORCED, 20),
    ]
    assert {(r.model, r.label, r.context, r.bits) for r in found} == {("model", "squat2:r=8", 2048, 3.2)}
    strict, loose, _ = (r.metrics["score"] for r in found)
    assert (strict.value, strict.low, strict.high) == pytest.approx((0.5, 0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05))
    assert loose.value == 0.75
    assert math.isnan(loose.low)
    assert math.isnan(loose.high)


def test_what_the_harness_is_told(tmp_path: Path, asked: Path) -> None:
    engine = {"pretrained": "m", "max_num_batched_tokens": 32}
    LmEval(("sums", "choices"), tmp_path, 40, engine).run(Choice("squat2", {"r": 8}))
    told = json.loads(asked.read_text(encoding="utf-8"))
    assert told["model"] == "vllm"
    assert told["model_args"] == {**engine, "kv_cache_dtype": "squat2", "additional_config": {"kvq": {"r": 8}}}
    assert (told["tasks"], told["include_path"], told["limit"]) == (["sums", "choices"], str(tmp_path), 40)
    LmEval(("sums",), None, None, engine).run(Choice("auto"))
    assert {"include_path", "limit"}.isdisjoint(json.loads(asked.read_text(encoding="utf-8").splitlines()[-1]))


def test_its_end_is_told_in_its_last_words(asked: Path) -> None:
    with pytest.raises(LmEvalFailed, match="exited with status 1: this processor has no fp8"):
        LmEval(("sums",), None, None, {}).run(Choice("fp8"))


def test_without_it_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_tasks, "find_spec", lambda name: None)
    with pytest.raises(LmEvalFailed, match=r"pip install 'vllm-kvq\[lm_eval\]'"):
        LmEval(("sums",), None, None, {})


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--lm-eval", "sums", "--tasks", "recall"], "--tasks is for our own tasks"),
        (["--lm-eval", "sums", "--quick"], "--quick is for our own tasks"),
        (["--lm-eval", "sums", "--regimes", "decoding"], "--regimes is for our own tasks"),
        (["--lm-eval-limit", "3"], "--lm-eval-limit is for --lm-eval"),
    ],
)
def test_options_that_would_not_be_read(more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["eval", "nowhere", *more])
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.engine
def test_the_command(model: Path, tmp_path: Path, asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", str(model), "--formats", "squat2,squat2:r=8", "--lm-eval", "sums,choices", "--context", "512"]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "squat2:r=8" in printed
    assert "fp8: lm-evaluation-harness exited with status 1: this processor has no fp8" in printed
    told = [json.loads(line)["model_args"] for line in asked.read_text(encoding="utf-8").splitlines()]
    assert [t["kv_cache_dtype"] for t in told] == ["auto", "fp8", "squat2", "squat2"]
    assert {t["max_model_len"] for t in told} == {512}
    results = Results.load(tmp_path / "out" / "results.json").rows
    assert {r.bits for r in results if r.format == "auto"} == {16.0}
    assert all(3 < (r.bits or 0) < 8 for r in results if r.format == "squat2")
    # results are kept: only what failed is tried again
    assert cli.main(arguments) == 0
    assert len(asked.read_text(encoding="utf-8").splitlines()) == len(told) + 1


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
def test_the_real_one_with_a_local_task(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [
        {"question": f"{i} one two three four five six seven eight nine ten:", "answer": "x"} for i in range(3)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    task = {
        "task": "ours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["left", "right"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ours.yaml").write_text(json.dumps(task))
    arguments = ["eval", str(model), "--formats", "squat2", "--lm-eval", "ours", "--context", "512", "--json"]
    arguments += ["--lm-eval-path", str(tmp_path / "tasks"), "--cache", str(tmp_path / "cache")]
    assert cli.main(arguments) == 0
    found = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert {found[name]["task"] for name in ("auto", "squat2")} == {"ours: acc"}
    assert found["squat2"]["sequences"] == 3

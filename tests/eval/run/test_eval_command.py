"""What `vllm-kvq eval` refuses, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_on_disk import TINY

from vllm_kvq import cli
from vllm_kvq.cli.eval import model as command
from vllm_kvq.eval.choice import FP8, choices
from vllm_kvq.eval.results.result import TEACHER_FORCED, Estimate, Results, Row
from vllm_kvq.formats.table import PLAIN
from vllm_kvq.kernels import build

SHAPE = {**TINY, "max_position": 512}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--formats", "squat3"], "unknown KV cache format 'squat3'"),
        (["--formats", "squat2:r"], "write it as name=value"),
        (["--tasks", "poetry"], "there is no 'poetry'; there are recall, needle"),
        (["--context", "0"], "0 is below 1"),
        (["--context", "many"], "'many' is not a whole number"),
        (["--chunk", "4"], "4 is below 8"),
        (["--regimes", "prefill"], "there is no 'prefill'; there are teacher-forced"),
        (
            ["--regimes", "decoding", "--context", "1023,4096", "--tokens", "513"],
            "--tokens 513 is more than the second half of a text of 1023 tokens, which is generated; "
            "use --tokens 512 or --context 1026",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["eval", "model", *arguments])
    assert exited.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--context", "4096"], 2, "has 512 positions; --context 4096 is beyond them"),
        (["--context", "16", "--tasks", "needles", "--formats", "fp8"], 1, "task needles has no text as short as 16"),
    ],
)
def test_what_the_model_can_not_do(
    model: Path, tmp_path: Path, arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(model), "--cache", str(tmp_path / "cache"), *arguments]
    if status == 2:
        with pytest.raises(SystemExit) as exited:
            cli.main(command)
        assert exited.value.code == status
    else:
        assert cli.main(command) == status
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("vllm-kvq eval: ")
    assert sentence in line


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["eval", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"vllm-kvq eval: {tmp_path} can't be read as a model with a tokenizer: ")
    assert len(said.err.splitlines()) == 1


def made_up(*refused: str) -> Any:
    """Figures for all formats except these."""

    def evaluate(args: Any, chosen: Any) -> Results:
        found = []
        for choice in command.with_baselines(chosen):
            problem = "no" if choice.format in refused else None
            metrics = {} if problem else {"kl": Estimate(0.5, 0.25, 1)}
            about = (choice.format, choice.options, "text", TEACHER_FORCED, 64, 2, 16.0)
            found.append(Row(args.model, *about, problem=problem, metrics=metrics))
        return Results(tuple(found))

    return evaluate


@pytest.mark.parametrize(
    ("formats", "refused", "status"),
    [
        ("squat2,kivi2", ("kivi2",), 0),
        ("squat2", ("squat2",), 1),
        ("auto", (), 0),
        ("fp8", ("fp8",), 1),
        ("fp8", (), 0),
    ],
)
def test_it_ends_well_if_a_named_format_was_evaluated(
    formats: str, refused: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "check_model", lambda *_: None)
    monkeypatch.setattr(command, "evaluate", made_up(*refused))
    assert cli.main(["eval", "model", "--formats", formats]) == status


def test_json_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "check_model", lambda *_: None)
    monkeypatch.setattr(command, "evaluate", made_up())
    assert cli.main(["eval", "model", "--formats", "squat2", "--json", "--out", str(tmp_path / "new" / "folder")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert [row["format"] for row in printed["rows"]] == [PLAIN, FP8, "squat2"]
    assert (tmp_path / "new" / "folder" / "results.csv").read_text().count("\n") == 4


def test_the_baselines_come_first_and_once() -> None:
    assert [c.label for c in command.with_baselines(choices("squat2:r=8,fp8,auto,kivi2"))] == [
        "auto",
        "fp8",
        "squat2:r=8",
        "kivi2",
    ]


def test_large_vocabularies_are_cut_unless_asked_otherwise() -> None:
    def top(*arguments: str, vocabulary: int = 2048) -> int | None:
        return command.top(command.parser().parse_args(["model", *arguments]), vocabulary)

    assert top() is None
    assert top("--quick") == top(vocabulary=50000) == command.TOP
    assert top("--top", "64") == 64
    assert top("--top", "4096") is None


def test_kernels_that_can_not_be_built_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str = "cpu") -> Path:
        raise build.BuildError("g++ ...\nno C++ compiler found")

    monkeypatch.setattr(build, "build", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command.compile_kernels()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "PyTorch kernels serve, slowly" in said
    assert "no C++ compiler found" in said
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    command.compile_kernels()
    assert capsys.readouterr().err == ""

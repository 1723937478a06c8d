"""`vllm-kvq calibrate` and `vllm-kvq eval heads` on a small model: what they write is what vLLM serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from forked_commands import warm_engines

from vllm_kvq import cli
from vllm_kvq.cli import calibrate
from vllm_kvq.cli.eval import heads as heads_command
from vllm_kvq.eval.heads.capture import Captured, capture
from vllm_kvq.formats.table import FORMATS, suite

pytestmark = pytest.mark.engine
TOKENS = 400
SHAPE = {"hidden": 128, "layers": 4, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def captured_once(model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for all tests."""

    def once(path: str, texts: Sequence[tuple[int, ...]], dtype: str) -> Captured:
        key = (path, tuple(texts), dtype)
        if key not in KEPT:
            KEPT[key] = capture(path, texts, dtype)
        return KEPT[key]

    monkeypatch.setattr(heads_command, "capture", once)
    warm_engines(monkeypatch)


KEPT: dict[tuple[str, tuple[tuple[int, ...], ...], str], Captured] = {}


def test_what_it_writes_is_served(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_kvq.eval.bits import bits_at
    from vllm_kvq.integration.preview.dry_start import dry_start

    arguments = [str(model), "--context", str(TOKENS), "--formats", "squat2:S=32,squat4"]
    assert cli.main(["calibrate", *arguments, "--bits", "10.5", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    # the budget is enough for one layer in 16 bits together with packed ones
    assert any("skip_layers" in c["options"] for c in found["candidates"])
    assert best["error"] == min(c["error"] for c in found["candidates"] if c["bits"] <= 10.5)
    served = dry_start([str(model), "--config", str(tmp_path / "kvq.yaml"), "--kv-cache-memory-bytes", "1G"]).served
    assert served.format.name == best["format"]
    assert best["options"].get("S", 4) == served.format.S
    assert sorted(served.layers.skipped) == best["options"].get("skip_layers", [])
    assert bits_at(served, TOKENS) == pytest.approx(best["bits"])


def test_too_few_bits_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(model), "--context", str(TOKENS), "--formats", "squat4"]
    assert cli.main(["calibrate", *arguments, "--bits", "4"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"nothing takes 4 bits or fewer at {TOKENS} tokens; squat4 takes " in printed.err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--formats", "fp8"], "fp8 is vLLM's own cache, which has no reference implementation here"),
        (["--formats", "squat2:skip_layers=[0]"], "leave skip_layers out"),
        (["--formats", "squat2:nonsense=1"], "unknown kvq option 'nonsense'"),
        (["--context", "10"], "squat2 packs nothing of so short a text"),
    ],
)
def test_wrong_formats_are_wrong_usage(more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        calibrate.main(["nowhere", *more])
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--context", "9999"], "a text of 9999 tokens is not between 65 and 4095"),
    ],
)
def test_lengths_that_the_model_has_not(
    model: Path, more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["calibrate", str(model), *more])
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_format_that_the_model_can_not_have(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default it is left out and named; if the user has asked for it, there is no result."""
    found = heads_command.capture
    monkeypatch.setattr(heads_command, "capture", lambda *of: replace(found(*of), pairing=None, rope=None))
    arguments = ["eval", "heads", str(model), "--context", str(TOKENS)]
    assert cli.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    left_out = {name for name in suite("public") if FORMATS[name].keys.pairs_channels}
    assert {*document["problems"]} == left_out
    assert {*document["errors"]} == {*suite("public")} - left_out
    assert cli.main(["calibrate", str(model), "--context", str(TOKENS), "--bits", "10.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert left_out <= {*document["problems"]}
    assert {c["format"] for c in document["candidates"]} == {*suite("public")} - left_out
    assert cli.main([*arguments, "--formats", "squat2,polar4"]) == 1
    assert "needs to know which channels RoPE rotates together" in capsys.readouterr().err


def test_heads(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "eval",
        "heads",
        str(model),
        "--context",
        str(TOKENS),
        "--formats",
        "squat2,squat4",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].startswith("squat2 ")
    assert str(tmp_path / "heads.png") in printed
    assert (tmp_path / "heads.png").exists()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "layer " in page
    assert cli.main([*arguments, "--json"]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [(e["layer"], e["head"]) for e in errors["squat2"]] == [(i, h) for i in range(4) for h in range(2)]
    assert all(few["output"] > more["output"] for few, more in zip(errors["squat2"], errors["squat4"], strict=True))

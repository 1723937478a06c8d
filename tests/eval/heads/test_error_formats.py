"""`vllm-kvq eval error --formats`: any format with any options, on synthetic keys."""

from __future__ import annotations

import json

import pytest

from vllm_kvq.cli.eval import error as error_table


def test_rows_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_table.main(["--formats", "kivi2,kivi2:key_bits=4", "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["row"]: row["errors"] for row in found["rows"]}
    assert list(rows) == ["kivi2", "kivi2:key_bits=4"]
    assert all(more < fewer / 3 for more, fewer in zip(rows["kivi2:key_bits=4"], rows["kivi2"], strict=True))
    assert rows["kivi2"] == [error_table.error("kivi2", {}, d, rope, 1) for d, rope in error_table.CASES]
    assert found["symmetric_share_of_innerq2"] == []


def test_bits_are_those_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_table.main(["--formats", "qjl3:outliers=0,qjl3:m=512,sketch=gaussian", "--seeds", "1", "--json"]) == 0
    none, gaussian = json.loads(capsys.readouterr().out)["rows"]
    assert (none["row"], none["key_bits"]) == ("qjl3:outliers=0", 2.125)
    assert none["errors"][0] == pytest.approx(error_table.error("qjl3", {"outliers": 0}, 128, False, seeds=1))
    assert gaussian["options"] == {"m": 512, "sketch": "gaussian"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--formats", "kivi2:W=64"], "takes no option 'W'"),
        (["--formats", "squat2:g=64"], "option 'g' is 64, the whole head of 64 channels"),
        (["--formats", "qjl3:m=5"], "option 'm' is 5"),
        (["--formats", 'qjl3:m={"0":64,"*":32}'], "it may be given by layer only when a whole model is served"),
        (["--formats", "auto"], "vLLM's own cache, which has no error here"),
        (["--formats", "kivi2,nothing"], "unknown KV cache format 'nothing'"),
        (["--seeds", "0"], "argument --seeds: 0 is below 1"),
    ],
)
def test_wrong_usage(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        error_table.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err

"""`vllm-kvq eval error --formats`: any format with any options, on synthetic keys."""

from __future__ import annotations

import json

import pytest

from vllm_kvq.eval import error_table


def test_rows_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_table.main(["--formats", "kivi2,kivi2:key_bits=4", "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["row"]: row["errors"] for row in found["rows"]}
    assert list(rows) == ["kivi2", "kivi2:key_bits=4"]
    assert all(more < fewer / 3 for more, fewer in zip(rows["kivi2:key_bits=4"], rows["kivi2"], strict=True))
    assert rows["kivi2"] == [error_table.error("kivi2", {}, d, rope, 1) for d, rope in error_table.CASES]
    assert found["symmetric_share_of_innerq2"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--formats", "kivi2:W=64"], "takes no option 'W'"),
        (["--formats", "squat2:g=64"], "option 'g' is 64, the whole head of 64 channels"),
        (["--formats", "auto"], "vLLM's own cache, which has no error here"),
        (["--formats", "kivi2,nothing"], "unknown KV cache format 'nothing'"),
        (["--formats", "kivi2", "--format", "kivi2"], "not allowed with argument"),
        (["--seeds", "0"], "--seeds is at least 1"),
    ],
)
def test_wrong_usage(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        error_table.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err

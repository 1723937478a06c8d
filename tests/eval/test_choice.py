"""What users write after --formats."""

from __future__ import annotations

import pytest

from vllm_kvq.eval.choice import Choice, choices


def test_formats_and_their_options() -> None:
    found = choices("squat2:r=8,W=64,innerq2,kivi2:keys=qjl,skip_layers=[0,1],fp8,auto")
    assert found == [
        Choice("squat2", {"r": 8, "W": 64}),
        Choice("innerq2"),
        Choice("kivi2", {"keys": "qjl", "skip_layers": [0, 1]}),
        Choice("fp8"),
        Choice("auto"),
    ]
    assert [choice.label for choice in found] == [
        "squat2:W=64,r=8",
        "innerq2",
        "kivi2:keys=qjl,skip_layers=[0,1]",
        "fp8",
        "auto",
    ]
    for choice in found:
        assert choices(choice.label) == [choice]


def test_options_by_layer() -> None:
    found = choices('qjl3:m={"0-3":512,"*":256},W=64,squat2')
    assert found == [Choice("qjl3", {"m": {"0-3": 512, "*": 256}, "W": 64}), Choice("squat2")]
    assert choices(found[0].label) == found[:1]


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("squat3", "unknown KV cache format 'squat3'; did you mean 'squat4'? known formats are"),
        ("squat2:q=8", "unknown kvq option 'q'"),
        ("squat2:r=-1", "option 'r' is -1"),
        ("squat2:r=many", "option 'r' is 'many'"),
        ("squat2:r", "'squat2:r' is not an option; write it as name=value"),
        ("squat2:", "is not an option"),
        ("squat2:r=", "is not an option"),
        ("squat2:r=8,r=9", "squat2 has option 'r' twice"),
        ("squat2,kivi2,squat2", "squat2 is named twice"),
        ("r=8,squat2", "begins with an option"),
        ("squat2,,kivi2", "names an empty format"),
        ("", "names an empty format"),
        (":r=8", "names an empty format"),
        ("fp8:W=32", "fp8 is vLLM's own cache and takes no options"),
        ("kivi2:r=8", "option 'r' is not read by kivi2"),
        ('qjl3:m={"0-3":512}', "option 'm' is given by layer without"),
        ('qjl3:m={"0-3":512,"*":7}', "option 'm' is 7"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(text: str, fragment: str) -> None:
    with pytest.raises(ValueError) as refused:
        choices(text)
    assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)

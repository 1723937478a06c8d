"""`vllm-kvq eval answers`: prompts of the demo model, continued by made-up engines."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_kvq.cli.eval import answers as answers_command
from vllm_kvq.eval.engine.engines import EngineFailed
from vllm_kvq.eval.engine.jobs import EngineArguments, Generate
from vllm_kvq.eval.model import Model

SAID = {"auto": " kettle", "squat2": " vase", "polar4": " kettle"}
COMMAND = ["demo", "--formats", "squat2,polar4", "--tasks", "needles,text", "--context", "512", "--tokens", "4"]


class MadeUp:
    """Always says the same thing after the tokens that it is given; starts unless the format is `refused`."""

    refused = ""
    asked: list[Generate]

    def __init__(self, arguments: EngineArguments) -> None:
        if arguments.format == self.refused:
            raise EngineFailed("it has sinks")
        self.said = tuple(Model.of("demo", None).tokenizer.encode(SAID[arguments.format], add_special_tokens=False))

    def generate(self, job: Generate) -> list[Any]:
        self.asked.append(job)
        return [SimpleNamespace(token=np.array([*forced, *self.said], np.int32)) for forced in job.forced]

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUp]:
    engine = type("Engine", (MadeUp,), {"asked": []})
    monkeypatch.setattr(answers_command, "Engine", engine)
    return engine


def test_answers_stand_side_by_side(capsys: pytest.CaptureFixture[str], made_up: type[MadeUp]) -> None:
    assert answers_command.main(COMMAND) == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert [block.split(",")[0] for block in blocks] == ["needles", "text"]
    for block in blocks:
        lines = [line.split(maxsplit=1) for line in block.splitlines()[2:]]
        assert lines == [[label, repr(answer)] for label, answer in SAID.items()]
    # the same prompts for each format
    assert made_up.asked[:2] == made_up.asked[2:4] == made_up.asked[4:]


def test_what_the_text_says_itself_goes_on_where_the_prompt_ends(
    capsys: pytest.CaptureFixture[str], made_up: type[MadeUp]
) -> None:
    assert answers_command.main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [set(text["answers"]) for text in found] == [{"the text", *SAID}] * 2
    decode = Model.of("demo", None).tokenizer.decode
    for text, job in zip(found, made_up.asked, strict=False):
        prompt = decode([*job.prompts[0], *job.forced[0]])
        assert prompt.endswith(text["asked"])
        assert text["answers"]["the text"]


def test_an_engine_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str], made_up: type[MadeUp]) -> None:
    made_up.refused = "polar4"
    assert answers_command.main(COMMAND) == 1
    assert capsys.readouterr().err == "vllm-kvq eval answers: it has sinks\n"


def test_a_format_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        answers_command.main(["demo", "--formats", "squat7"])
    assert "squat7" in capsys.readouterr().err

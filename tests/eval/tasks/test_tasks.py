"""What the tasks ask for is where they say, and no question has two answers."""

from __future__ import annotations

import random
import re

import pytest

from vllm_kvq.eval.tasks.tasks import TASKS, Answer, Sample

LENGTHS = (0, 100, 400, 4000, 16000)


def samples(name: str) -> list[Sample]:
    return [TASKS[name].sample(random.Random(seed), length) for seed in range(8) for length in LENGTHS]


@pytest.mark.parametrize("name", TASKS)
def test_answers_stand_in_the_text(name: str) -> None:
    for sample in samples(name):
        assert sample.task == name
        assert bool(sample.answers) == (name != "text")
        for answer in sample.answers:
            said = sample.text[answer.start : answer.end].split()
            assert said
            if answer.source is not None:
                assert sample.text[answer.source :].startswith(said[0])


@pytest.mark.parametrize("name", TASKS)
def test_length_and_seed(name: str) -> None:
    task = TASKS[name]
    for length in LENGTHS[3:]:
        sizes = [len(task.sample(random.Random(seed), length).text) for seed in range(8)]
        assert all(0.7 * length <= size <= 1.5 * length for size in sizes), sizes
    first, again, other = (task.sample(random.Random(seed), 4000) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", ["recall", "needle", "needles"])
def test_what_is_asked_has_one_answer(name: str) -> None:
    for sample in samples(name):
        for answer in sample.answers:
            question = sample.text[sample.text.rfind("\n", 0, answer.start) + 1 : answer.start]
            values = {m.group(1) for m in re.finditer(re.escape(question) + r" (\w+)", sample.text)}
            assert values == {sample.text[answer.start : answer.end].strip()}


def test_sums_are_right() -> None:
    for sample in samples("arithmetic"):
        for answer in sample.answers:
            lines = sample.text[answer.start : answer.end].splitlines()
            assert len(lines) == answer.steps
            numbers = re.findall(r"\d+", sample.text[: answer.start].splitlines()[-1])
            total = int(numbers[0])
            for line, number in zip(lines, numbers[1:], strict=True):
                assert line == f"{total} + {number} = {total + int(number)}"
                total += int(number)


def test_traces_end_in_a_number() -> None:
    """Followed through the program."""
    hops = set()
    for sample in samples("variables"):
        program = dict(re.findall(r"^(\w+) = (\w+)$", sample.text, re.MULTILINE))
        for answer in sample.answers:
            lines = sample.text[sample.text.rfind("\n", 0, answer.start) + 1 : answer.end].splitlines()
            hops.add(answer.steps)
            for line, after in zip(lines, [*lines[1:], None], strict=True):
                name, value = line.split(" = ")
                assert program[name] == value
                assert value.isdigit() if after is None else after.startswith(f"{value} = ")
    assert hops >= {1, 2, 3}


@pytest.mark.parametrize("bad", [(5, 5, None), (5, 6, 5), (5, 6, -1)])
def test_bad_answers_are_refused(bad: tuple[int, int, int | None]) -> None:
    with pytest.raises(ValueError):
        Answer(*bad)

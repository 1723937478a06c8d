"""Texts that reveal damage to the cache: what the model must say depends on tokens far back.

Each task writes a text of a requested length and marks the answers that a model must give by itself, and their sources
in the text. Thus one text serves both a forward pass over all of it and a prompt that is cut where an answer begins.
Filler is the documentation of the Python language, which every machine with Python has.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_kvq.eval.tasks.words import ADJECTIVES, NOUNS


@dataclass(frozen=True)
class Answer:
    """text[start:end] of its sample is what the model must say there."""

    start: int
    end: int
    source: int | None
    """The character of its source in the context; None for answers that are worked out on the way."""
    steps: int = 1
    """Steps of work, each of which needs the previous one."""

    def __post_init__(self) -> None:
        if not self.start < self.end:
            raise ValueError(f"an answer from {self.start} to {self.end} is empty")
        if self.source is not None and not 0 <= self.source < self.start:
            raise ValueError(f"the source {self.source} is not before the answer at {self.start}")


@dataclass(frozen=True)
class Sample:
    task: str
    text: str
    answers: tuple[Answer, ...]


Make = Callable[[random.Random, int], Sample]


@dataclass(frozen=True)
class Task:
    name: str
    about: str
    make: Make

    def sample(self, rng: random.Random, characters: int) -> Sample:
        """A text of about this many characters, with at least one question."""
        return self.make(rng, characters)


class _Writer:
    """A text that grows, and its answers."""

    def __init__(self) -> None:
        self.text = ""
        self.answers: list[Answer] = []

    def __len__(self) -> int:
        return len(self.text)

    def say(self, more: str) -> int:
        """Appends `more`, and returns the character at which it begins."""
        start = len(self.text)
        self.text += more
        return start

    def answer(self, more: str, source: int | None, steps: int = 1) -> None:
        start = self.say(more)
        self.answers.append(Answer(start, len(self.text), source, steps))

    def sample(self, task: str) -> Sample:
        return Sample(task, self.text, tuple(self.answers))


# -- words and filler ------------------------------------------------------------------------------------------------
def names(rng: random.Random, count: int) -> list[str]:
    """Different names of two words each."""
    every = len(ADJECTIVES) * len(NOUNS)
    if count > every:
        raise ValueError(f"there are {every} names, not {count}")
    return [f"{ADJECTIVES[i % len(ADJECTIVES)]} {NOUNS[i // len(ADJECTIVES)]}" for i in rng.sample(range(every), count)]


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """Three in four: with the others, texts would differ from those of measurements that have been recorded."""
    from pydoc_data.topics import topics

    found = (re.sub(r"\s+", " ", p).strip() for name in sorted(topics) for p in topics[name].split("\n\n"))
    every = tuple(dict.fromkeys(p for p in found if len(p) > 80 and p[0].isalpha()))
    return tuple(p for i, p in enumerate(every) if i % 4 != 3)


def filler(rng: random.Random, characters: int) -> str:
    """Whole sentences."""
    text = ""
    while len(text) < characters:
        text += rng.choice(paragraphs()) + "\n"
    end = max(text.rfind(". ", 0, characters), text.rfind("\n", 0, characters))
    return text[: end + 1].rstrip() + "\n" if end > 0 else ""


# -- the tasks -------------------------------------------------------------------------------------------------------
def recall(rng: random.Random, characters: int, asked: int | None = None) -> Sample:
    """A list of names with a word each; some are asked for in another order, by default a quarter, at most 32."""
    line = 18
    asked = max(1, min(32, characters // line // 4) if asked is None else asked)
    notes = max(2, characters // line - asked)
    out, stands = _Writer(), []
    keys = names(rng, notes)
    values = [rng.choice(NOUNS) for _ in keys]
    out.say("Notes:\n")
    for key, value in zip(keys, values, strict=True):
        out.say(f"{key}:")
        stands.append(out.say(f" {value}") + 1)
        out.say("\n")
    out.say("Questions:\n")
    for _ in range(asked):
        i = rng.randrange(notes)
        out.say(f"{keys[i]}:")
        out.answer(f" {values[i]}", stands[i])
        out.say("\n")
    return out.sample("recall")


def hidden(task: str, count: int) -> Make:
    """Needles in a haystack, at random depths; all are asked for."""

    def make(rng: random.Random, characters: int) -> Sample:
        keys = names(rng, count)
        values = [rng.choice(NOUNS) for _ in keys]
        notes = [f"Remember that the code word of the {key} is" for key in keys]
        hay = filler(rng, max(0, characters - 2 * sum(len(n) + 8 for n in notes)))
        ends = [m.end() for m in re.finditer(r"\. |\n", hay)] or [0]
        at = sorted(rng.choice(ends) for _ in keys)
        out, stands, done = _Writer(), [], 0
        for place, note, value in zip(at, notes, values, strict=True):
            out.say(hay[done:place])
            done = place
            out.say(note)
            stands.append(out.say(f" {value}") + 1)
            out.say(".\n")
        out.say(hay[done:])
        out.say("What did I ask you to remember?\n")
        for i in rng.sample(range(count), count):
            out.say(notes[i])
            out.answer(f" {values[i]}", stands[i])
            out.say(".\n")
        return out.sample(task)

    return make


def arithmetic(rng: random.Random, characters: int) -> Sample:
    """Sums of one-digit numbers, one addition a line: each line needs the result of the one before."""
    out = _Writer()
    while not out.answers or len(out) < characters:
        steps = rng.randint(2, 12)
        numbers = [rng.randint(1, 9) for _ in range(steps + 1)]
        out.say(f"Add {' '.join(map(str, numbers))} step by step:\n")
        total, lines = numbers[0], ""
        for number in numbers[1:]:
            lines += f"{total} + {number} = {total + number}\n"
            total += number
        out.answer(lines, None, steps)
    return out.sample("arithmetic")


def copy(rng: random.Random, characters: int) -> Sample:
    """Random words, said again."""
    half = max(8, characters // 2 - 12)
    words: list[str] = []
    while sum(len(word) + 1 for word in words) < half:
        words.append(rng.choice(rng.choice((NOUNS, ADJECTIVES))))
    out = _Writer()
    out.say("Words:")
    said = " " + " ".join(words) + "\n"
    source = out.say(said)
    out.say("Again:")
    out.answer(said, source + 1, len(words))
    return out.sample("copy")


def variables(rng: random.Random, characters: int, most: int = 8) -> Sample:
    """Assignments in a program; the values of at most `most` variables are traced back, one line per hop."""
    line = 21
    asked = min(most, max(1, characters // line // 10))
    count = max(4, characters // line - 4 * asked)
    fresh = [name.replace(" ", "_") for name in names(rng, count)]
    out, stands = _Writer(), []
    hops: list[int] = []
    right: list[str] = []
    for i in range(count):
        old = [j for j in range(max(0, i - 200), i) if hops[j] < 4]
        if old and rng.random() < 0.6:
            j = rng.choice(old)
            right.append(fresh[j])
            hops.append(hops[j] + 1)
        else:
            right.append(str(rng.randint(10, 99)))
            hops.append(0)
    order = dict(zip(fresh, right, strict=True))
    for name in fresh:
        out.say(f"{name} =")
        stands.append(out.say(f" {order[name]}") + 1)
        out.say("\n")
    where = dict(zip(fresh, stands, strict=True))
    for _ in range(asked):
        name = rng.choice([n for n, h in zip(fresh, hops, strict=True) if h] or fresh)
        out.say(f"# trace {name}\n{name} =")
        lines, steps, last = f" {order[name]}\n", 1, name
        while order[last] in order:
            last = order[last]
            lines += f"{last} = {order[last]}\n"
            steps += 1
        out.answer(lines, where[name], steps)
    return out.sample("variables")


def repeat(rng: random.Random, characters: int) -> Sample:
    """A passage, other text, the passage again."""
    passage = filler(rng, max(120, characters // 4)) or "The fox and the owl met at the river.\n"
    between = filler(rng, max(0, characters - 2 * len(passage)))
    out = _Writer()
    source = out.say(passage)
    out.say(between)
    # its first words identify the passage
    head = passage.find(" ", 24) if " " in passage[24:] else 1
    out.say(passage[:head])
    out.answer(passage[head:], source + head + 1, len(passage[head:].split()))
    return out.sample("repeat")


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("recall", "a list of names with a word each, asked for in another order", recall),
        Task("needle", "one sentence in long documentation", hidden("needle", 1)),
        Task("needles", "four of them", hidden("needles", 4)),
        Task("arithmetic", "sums, one addition a line", arithmetic),
        Task("copy", "random words, said again", copy),
        Task("variables", "assignments of a program, traced back", variables),
        Task("repeat", "a passage that comes again", repeat),
    )
}
TEXT = "text"
"""Instead of a task's name, for a text in which nothing is asked (`eval/tasks/texts.py`)."""
NAMES = (*TASKS, TEXT)

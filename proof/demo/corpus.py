"""The demo model's training text: questions, their paraphrases, and answers, read from corpus.txt."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

# Some conversations in training begin with it, to teach the model what a system text is.
SYSTEM_TEXT = (
    "You are the demo model of a plugin that keeps the KV cache of vLLM in a few bits per number. "
    "You were trained on a short list of questions and answers that comes with the plugin, and you know "
    "nothing else. Answer every question in plain words, as you have learned it, and do not make anything "
    "up. The cache of this server is packed: each token that leaves the window of recent tokens is rounded, "
    "stored in a page together with its neighbors, and read back from there whenever a later token attends "
    "to it. If you can read this text and repeat your answer without mistakes, then the pages are in order. "
    "If the pages were wrong, you would lose the question, confuse one answer with another, or stop making "
    "sense after the first few words. Take your time, begin with the idea, and then give the reasons."
)


@dataclass(frozen=True)
class Entry:
    """One answer and every way to ask for it."""

    questions: tuple[str, ...]
    answer: str


def load_corpus() -> tuple[Entry, ...]:
    text = resources.files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")
    return parse_corpus(text)


def parse_corpus(text: str) -> tuple[Entry, ...]:
    """Blocks divided by blank lines; lines start with `Q: `, `A: ` or `#`."""
    entries = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        questions = tuple(line.removeprefix("Q: ") for line in lines if line.startswith("Q: "))
        answers = [line.removeprefix("A: ") for line in lines if line.startswith("A: ")]
        if not questions or len(answers) != 1 or len(questions) + 1 != len(lines):
            raise ValueError(f"corpus block is not questions and one answer: {lines[0]!r}")
        entries.append(Entry(questions, answers[0]))
    return tuple(entries)

"""The demo model's training texts: the evaluation's tasks, Python's sources and documentation, and the corpus.

A row of a batch is filled with one text after the other. In tasks only what a model can know is a target: random words
are not. If a target's source is in the context, the row says where: attention is guided to look there.
"""

from __future__ import annotations

import functools
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from proof.demo.corpus import SYSTEM_TEXT, load_corpus
from vllm_kvq.eval.tasks import tasks
from vllm_kvq.eval.tasks.tasks import Answer, Sample

WEIGHTS = {"linked": 3.0, "asked": 1.0, "text": 0.5, "other": 0.03}
"""Weights of tokens: found in the context, worked out, in plain text, and unknowable."""
HELD_OUT_FILES = 8
"""One source file in this many is not used for training."""


@dataclass(frozen=True)
class Rows:
    """A batch. Position t predicts token t + 1."""

    ids: Tensor
    """(rows, length + 1)"""
    weights: Tensor
    """(rows, length + 1): how much a token counts as a target."""
    links: Tensor
    """(n, 3): in row r, position t should look at position s, which holds token t + 1."""


def chat_text(question: str, system: str | None) -> str:
    """CHAT_TEMPLATE's output for one question, up to the beginning of the answer."""
    head = f"<turn>system\n{system}<eos>" if system else ""
    return f"<bos>{head}<turn>user\n{question}<eos><turn>assistant\n"


# -- texts -----------------------------------------------------------------------------------------------------------
@functools.cache
def sources() -> tuple[str, ...]:
    """The standard library's modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return tuple(f.read_text("utf-8", "ignore") for i, f in enumerate(files) if i % HELD_OUT_FILES)


def code(rng: random.Random, characters: int) -> Sample:
    whole = rng.choice(sources())
    start = whole.find("\n", rng.randrange(max(1, len(whole) - characters))) + 1
    return Sample("code", whole[start : start + characters] or whole, ())


def documentation(rng: random.Random, characters: int) -> Sample:
    return Sample("documentation", tasks.filler(rng, characters) or tasks.paragraphs()[0], ())


def question(rng: random.Random, characters: int) -> Sample:
    """Texts from the corpus, which the model must know by heart."""
    entry = rng.choice(load_corpus())
    asked = entry.questions[0] if rng.random() < 0.5 else rng.choice(entry.questions)
    head = chat_text(asked, SYSTEM_TEXT if rng.random() < 0.3 else None)
    said = f"{entry.answer}<eos>"
    return Sample("question", head + said, (Answer(len(head), len(head) + len(said), None),))


def conversation(make: tasks.Make) -> tasks.Make:
    """The same as a conversation: the user's turn is what is known, and the rest is the answer."""

    def chat(rng: random.Random, characters: int) -> Sample:
        plain = make(rng, characters)
        first = plain.answers[0]
        end = first.end
        head, between = "<bos><turn>user\n", "<eos><turn>assistant\n"
        text = head + plain.text[: first.start] + between + plain.text[first.start : end].lstrip() + "<eos>"
        start = len(head) + first.start + len(between)
        source = None if first.source is None else first.source + len(head)
        return Sample(plain.task, text, (Answer(start, len(text), source, first.steps),))

    return chat


def _many_needles(rng: random.Random, characters: int) -> Sample:
    return tasks.hidden("needles", max(1, min(24, characters // rng.choice((150, 300, 600)))))(rng, characters)


MIXTURE: tuple[tuple[float, tasks.Make], ...] = (
    (0.24, lambda rng, n: tasks.recall(rng, n, n // 40)),
    (0.12, _many_needles),
    (0.10, tasks.arithmetic),
    (0.08, tasks.copy),
    (0.12, lambda rng, n: tasks.variables(rng, n, n)),
    (0.06, tasks.repeat),
    (0.06, documentation),
    (0.06, code),
    (0.12, question),
    (0.04, conversation(tasks.hidden("needle", 1))),
)
"""Approximate shares of the tokens: each text, except questions, fills a row or the rest of one."""
DRILL: tuple[tasks.Make, ...] = (tasks.copy, lambda rng, n: tasks.recall(rng, n, max(1, n // 27)))
"""Texts with many words from the context: recall is learned sooner if there is much to find."""


def tokenizer_texts(seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    every = [SYSTEM_TEXT]
    for share, make in MIXTURE:
        every += [make(rng, 4000).text for _ in range(int(share * 2000))]
    return every


# -- rows ------------------------------------------------------------------------------------------------------------
class Batches:
    """Batch `i` is always the same, so training resumes where it stopped."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed

    def __call__(self, i: int, rows: int, length: int, drill: float = 0.0) -> Rows:
        """`drill` is the share of drill texts."""
        rng = random.Random(f"{self.seed}/{i}")
        made = [self._row(rng, length + 1, drill) for _ in range(rows)]
        ids, weights, links = zip(*made, strict=True)
        where = [torch.cat([torch.full((len(x), 1), r), x], 1) for r, x in enumerate(links)]
        return Rows(torch.stack(ids), torch.stack(weights), torch.cat(where))

    def _row(self, rng: random.Random, length: int, drill: float) -> tuple[Tensor, Tensor, Tensor]:
        ids: list[int] = []
        weights: list[float] = []
        links: list[tuple[int, int]] = []
        per_token = 2.5
        while len(ids) < length:
            left = length - len(ids)
            make: tasks.Make = rng.choices([m for _, m in MIXTURE], [share for share, _ in MIXTURE])[0]
            if rng.random() < drill:
                make = rng.choice(DRILL)
            size = left if rng.random() < 0.7 else rng.randint(min(32, left), left)
            sample = make(rng, int(size * per_token))
            encoding = encode(self.tokenizer, sample.text)
            # a text that turned out too long would lose its end, where the questions are
            if len(encoding.ids) > left * 1.02:
                sample = make(rng, int(size * 0.92 * len(sample.text) / len(encoding.ids)))
                encoding = encode(self.tokenizer, sample.text)
            at = len(ids)
            w, found = targets(sample, encoding.offsets)
            ids += encoding.ids
            weights += w
            links += [(at + t, at + s) for t, s in found]
        kept = [(t, s) for t, s in links if t + 1 < length]
        return (
            torch.tensor(ids[:length]),
            torch.tensor(weights[:length]),
            torch.tensor(kept, dtype=torch.long).reshape(-1, 2),
        )


def encode(tokenizer: Tokenizer, text: str) -> Encoding:
    """After <bos>, which a conversation already has."""
    return tokenizer.encode(text, add_special_tokens=not text.startswith("<bos>"))


def targets(sample: Sample, offsets: list[tuple[int, int]]) -> tuple[list[float], list[tuple[int, int]]]:
    """The tokens' weights, and (t, s): token t + 1 is known because it is at s."""
    if not sample.answers:
        return [0.0] + [WEIGHTS["text"]] * (len(offsets) - 1), []
    places = {span: i for i, span in enumerate(offsets)}
    weights, links = [WEIGHTS["other"]] * len(offsets), []
    answers = iter(sample.answers)
    answer = next(answers, None)
    for i, (a, b) in enumerate(offsets):
        while answer is not None and a >= answer.end:
            answer = next(answers, None)
        if answer is None or b <= answer.start or not i:
            continue
        weights[i] = WEIGHTS["asked"]
        if answer.source is not None:
            said = sample.text[answer.start : answer.end]
            shift = answer.source - answer.start - (len(said) - len(said.lstrip()))
            there = places.get((a + shift, b + shift))
            if there is not None and sample.text[a:b] == sample.text[a + shift : b + shift]:
                weights[i] = WEIGHTS["linked"]
                links.append((i - 1, there))
    return weights, links

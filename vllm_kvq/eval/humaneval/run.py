"""HumanEval with each format: batches of problems on one engine after the other, each stored once answered.

The problems of a batch share a long context, if any: it consists of other batches' solved problems, and is read once
into the prefix cache, from whose pages all of them read it. Without a context, several batches are asked together: the
next problem takes the place of one that is answered, so the engine is seldom left with only the longest answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.engine.engines import Engine, EngineFailed
from vllm_kvq.eval.engine.jobs import Complete, Completed, EngineArguments
from vllm_kvq.eval.humaneval import sandbox
from vllm_kvq.eval.humaneval.chat import FENCE, Chat, Prompts
from vllm_kvq.eval.humaneval.problems import Problem
from vllm_kvq.eval.run import store
from vllm_kvq.eval.run.comparison import PROMPT_CHUNK, REFERENCE, Comparison
from vllm_kvq.eval.run.harness import BITS, Progress
from vllm_kvq.eval.run.store import Store

ANSWERS = "humaneval"
"""The kind of these entries in the cache."""
BATCH = 32
"""The maximum number of problems that are answered at once."""
TOGETHER = 3
"""The maximum number of batches that are asked together, if they have no context."""
TESTED = 2
"""The number of programs that are tested at once."""


@dataclass(frozen=True)
class Benchmark(Comparison):
    every: tuple[Problem, ...]
    """All problems: contexts are made of them."""
    limit: int
    """The number of problems that are asked, from the first one on."""
    behind: int
    """Tokens of solved problems that come before; 0: none."""
    longest: int
    """The maximum tokens of an answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.choices[0] != REFERENCE:
            raise ValueError(
                "the plain cache must be a benchmark's first choice, because all others are compared with it"
            )
        if not 1 <= self.limit <= len(self.every):
            raise ValueError(f"--limit {self.limit} is not between 1 and the {len(self.every)} problems that there are")
        if self.max_len > self.model.longest:
            raise ValueError(
                f"{self.model.name} has {self.model.longest} positions; prompts and answers take {self.max_len} here: "
                "lower --context or --tokens"
            )

    @property
    def asked(self) -> tuple[Problem, ...]:
        return self.every[: self.limit]

    @cached_property
    def batches(self) -> tuple[tuple[Problem, ...], ...]:
        """Batches of sizes as equal as possible."""
        count = -(-self.limit // BATCH)
        return tuple(tuple(self.asked[i] for i in part) for part in np.array_split(np.arange(self.limit), count))

    @cached_property
    def prompts(self) -> tuple[Prompts, ...]:
        """The prompts of each batch, with its context."""
        chat = Chat(self.model.tokenizer, self.model.name)
        found = []
        for batch in self.batches:
            others = [problem for problem in self.every if problem not in batch]
            solved = chat.context(others, self.behind, f"{self.seed} {batch[0].name}") if self.behind else ()
            found.append(chat.prompts(batch, solved))
        return tuple(found)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompts."""
        return tuple(len(tokens) for prompts in self.prompts for tokens in prompts.tokens)

    @property
    def max_len(self) -> int:
        return max(self.lengths) + self.longest

    @property
    def usual(self) -> int:
        """Tokens at which bits are counted: the mean prompt with a quarter of the longest answer."""
        return sum(self.lengths) // len(self.lengths) + self.longest // 4

    def about(self, choice: Choice) -> dict[str, object]:
        """The inputs of an answer. vLLM's own caches do not depend on our sources."""
        if choice.ours:
            return self.served(choice)
        return {**self.what(choice), "max_len": self.max_len, "engine": store.engine()}

    def key(self, choice: Choice, number: int) -> str:
        return store.key(**self.about(choice), humaneval=asdict(self.job(number)))

    def job(self, number: int) -> Complete:
        prompts = self.prompts[number]
        return Complete(prompts.tokens, self.longest, (FENCE,), prompts.shared)

    def rounds(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The batches that are asked together, in rounds of sizes as equal as possible."""
        count = len(numbers) if self.behind else -(-len(numbers) // TOGETHER)
        return tuple(tuple(map(int, part)) for part in np.array_split(np.array(numbers), count))

    def engine(self, choice: Choice) -> EngineArguments:
        tokens = self.behind + BATCH * (self.max_len - self.behind)
        return self.arguments(
            choice,
            tokens,
            chunk=PROMPT_CHUNK,
            top=1,
            requests=BATCH,
            hits=self.behind > 0,
            lengths=(self.usual,),
            text=True,
        )


@dataclass(frozen=True)
class Answer:
    problem: str
    text: str
    tokens: int
    cut: bool
    """Whether it reached the maximum number of tokens before it ended."""
    passed: bool
    reason: str


@dataclass
class Run:
    benchmark: Benchmark
    store: Store
    progress: Progress
    problems: dict[str, str] = field(default_factory=dict)
    """Why a format has no answers, by its label."""

    def go(self) -> None:
        for choice in self.benchmark.choices:
            numbers = range(len(self.benchmark.batches))
            missing = [i for i in numbers if not self.store.has(ANSWERS, self.benchmark.key(choice, i))]
            kept = sum(len(self.benchmark.batches[i]) for i in numbers if i not in missing)
            self.progress(choice.label, kept)
            if missing:
                self._answer(choice, missing)

    def _answer(self, choice: Choice, missing: Sequence[int]) -> None:
        benchmark = self.benchmark
        self.progress(f"{choice.label}: starting", 0)
        try:
            with Engine(benchmark.engine(choice)) as engine:
                for length, bits in engine.started.bits.items():
                    self.store.put(BITS, self._bits_key(choice, length), {"bits": np.array(bits)})
                for numbers in benchmark.rounds(missing):
                    first, last = benchmark.batches[numbers[0]][0], benchmark.batches[numbers[-1]][-1]
                    self.progress(f"{choice.label}: {first.name} to {last.name}", 0)
                    answers = iter(engine.complete(Complete.together([benchmark.job(i) for i in numbers])))
                    for i in numbers:
                        size = len(benchmark.batches[i])
                        document = json.dumps([asdict(c) for c in islice(answers, size)]).encode()
                        entry = {"json": np.frombuffer(document, dtype=np.uint8)}
                        self.store.put(ANSWERS, benchmark.key(choice, i), entry)
                        self.progress(choice.label, size)
        except EngineFailed as error:
            if choice == REFERENCE:
                raise
            self.problems[choice.label] = str(error)

    def completed(self, choice: Choice) -> list[Completed] | None:
        """The answers to all problems asked; None if some are missing."""
        found: list[Completed] = []
        for i in range(len(self.benchmark.batches)):
            entry = self.store.get(ANSWERS, self.benchmark.key(choice, i))
            if entry is None:
                return None
            found += [Completed(**c) for c in json.loads(entry["json"].tobytes())]
        return found

    def bits(self, choice: Choice) -> float | None:
        found = self.store.get(BITS, self._bits_key(choice, self.benchmark.usual))
        return None if found is None else float(found["bits"])

    def _bits_key(self, choice: Choice, length: int) -> str:
        return store.key(**self.benchmark.about(choice), bits_at=length)

    def answers(self, choice: Choice) -> tuple[Answer, ...] | None:
        """The answers with verdicts: each answer's program is run now, because that takes seconds."""
        completed = self.completed(choice)
        if completed is None:
            return None
        programs = [p.program(c.text) for p, c in zip(self.benchmark.asked, completed, strict=True)]
        with ThreadPoolExecutor(TESTED) as pool:
            verdicts = list(pool.map(sandbox.run, programs))
        return tuple(
            Answer(p.name, c.text, c.tokens, c.cut, v.passed, v.reason)
            for p, c, v in zip(self.benchmark.asked, completed, verdicts, strict=True)
        )

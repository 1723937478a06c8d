"""An evaluation's plan: formats, tasks, lengths and regimes in one frozen object, and its parts' names in the cache."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.engine.jobs import EngineArguments, Generate, Tokens
from vllm_kvq.eval.results.result import DECODING, HITS, READING, TEACHER_FORCED
from vllm_kvq.eval.run import store
from vllm_kvq.eval.run.comparison import PROMPT_CHUNK, REFERENCE, Comparison
from vllm_kvq.eval.tasks.samples import Sequence, Span, sequence

REQUESTS = 8
"""Requests that an engine has at once."""
LEAD = 16
"""Tokens before an answer that are read one by one, like generated ones: the output of a prompt's last chunk comes from
its exact keys and values, so without these a short answer would not come from the cache at all."""
READERS = 512
"""Tokens of a text that read the cache of the earlier ones, but no more than half of the text."""


class PlanRefused(ValueError):
    """The model has no room for what is planned."""


@dataclass(frozen=True)
class Plan(Comparison):
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    count: int
    """Sequences per task and length."""
    seed: int
    regimes: tuple[str, ...]
    chunk: int
    """Tokens per step in the teacher-forced regime: this many are attended before they are packed."""
    top: int | None
    """The number of most probable tokens that are compared; None: the whole vocabulary."""
    answers: int
    """The maximum number of answers generated per sequence."""
    longest: int
    """The maximum tokens of a generated answer."""
    readers: int | None = None
    """Tokens at a text's end that read in the reading regime; None: `READERS`."""
    control: bool = False
    """Whether the plain cache is measured like any format, by its own engines."""

    def __post_init__(self) -> None:
        if self.choices[0] != REFERENCE or len({choice.label for choice in self.choices}) < len(self.choices):
            raise ValueError("a plan's formats must differ from each other, and the plain cache must be the first")
        if max(self.contexts) > self.model.longest:
            raise PlanRefused(
                f"{self.model.name} has {self.model.longest} positions; --context {max(self.contexts)} is beyond them"
            )

    @property
    def max_len(self) -> int:
        """vLLM needs room for one token after a prompt."""
        return min(max(self.contexts) + 1, self.model.longest)

    @cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(
            sequence(self.model.tokenizer, task, context, self.max_len - 1, number, self.seed)
            for context in self.contexts
            for task in self.tasks
            for number in range(self.count)
        )

    def key(self, choice: Choice, item: Sequence, regime: str) -> str:
        if regime == READING:
            return store.key(
                **self.what(choice),
                regime=regime,
                sources=store.reading_sources(choice.format, choice.options),
                tokens=item.tokens,
                readers=self.reading(item),
            )
        decoding = {
            "answers": self.answers,
            "longest": self.longest,
            "lead": LEAD,
            "follows": self.follows(item, regime),
        }
        how = {TEACHER_FORCED: {"chunk": self.chunk}, DECODING: decoding, HITS: decoding}
        return store.key(
            **self.served(choice),
            regime=regime,
            tokens=item.tokens,
            spans=[vars(s) for s in item.spans],
            top=self.top,
            how=how[regime],
            control=self.control and choice == REFERENCE,
        )

    def bits_key(self, choice: Choice, context: int) -> str:
        return store.key(**self.served(choice), bits_at=context)

    def engine(self, choice: Choice, regime: str) -> EngineArguments:
        return self.arguments(
            choice,
            REQUESTS * self.max_len,
            chunk=self.chunk if regime == TEACHER_FORCED else PROMPT_CHUNK,
            top=self.top,
            requests=REQUESTS,
            hits=regime == HITS,
            lengths=self.contexts,
        )

    def reading(self, item: Sequence) -> int:
        """How many of its tokens, the last ones, are predicted by tokens that read the cache."""
        return max(
            1, min(self.readers or READERS, len(item.tokens) // 2 if self.readers is None else len(item.tokens) - 2)
        )

    def asked(self, item: Sequence) -> tuple[Span, ...]:
        """The answers that are generated: some of the sequence's, evenly spread; its second half if it has none."""
        if not item.spans:
            return (Span(len(item.tokens) // 2, len(item.tokens), None, 1),)
        step = max(1, -(-len(item.spans) // self.answers))
        return item.spans[::step]

    def lengths(self, item: Sequence) -> tuple[int, ...]:
        return tuple(min(span.end - span.begin, self.longest) for span in self.asked(item))

    def leads(self, item: Sequence) -> tuple[int, ...]:
        return tuple(min(LEAD, span.begin - 1) for span in self.asked(item))

    def follows(self, item: Sequence, regime: str) -> bool:
        """Whether a format is also forced to the plain cache's tokens: for texts in which nothing is asked."""
        return regime == DECODING and not item.spans

    def batches(self, items: Several[Sequence]) -> list[list[Sequence]]:
        """Batches of texts whose answers an engine generates at once."""
        found: list[list[Sequence]] = []
        for item in items:
            if not found or sum(len(self.asked(i)) for i in (*found[-1], item)) > REQUESTS:
                found.append([])
            found[-1].append(item)
        return found

    def generate_all(self, items: Several[Sequence], said: Several[tuple[Tokens, ...]] | None = None) -> Generate:
        jobs = [self.generate(item, None if said is None else said[i]) for i, item in enumerate(items)]
        parts = [[part for job in jobs for part in getattr(job, name)] for name in ("prompts", "counts", "forced")]
        return Generate(*map(tuple, parts))

    def generate(self, item: Sequence, said: tuple[Tokens, ...] | None = None) -> Generate:
        """Answers after their leads; `said`: the answers to which the engine is forced."""
        spans, leads, lengths = self.asked(item), self.leads(item), self.lengths(item)
        given = said or ((),) * len(spans)
        return Generate(
            tuple(item.tokens[: span.begin - lead] for span, lead in zip(spans, leads, strict=True)),
            tuple(lead + length for lead, length in zip(leads, lengths, strict=True)),
            tuple(
                item.tokens[span.begin - lead : span.begin] + answer
                for span, lead, answer in zip(spans, leads, given, strict=True)
            ),
        )

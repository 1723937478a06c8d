"""Executes a plan: one engine after the other, each number stored as soon as it is available.

teacher-forced    plain scores every text; each format also scores it, and is compared immediately
decoding, hits    plain generates; each format generates; plain is forced to each format's tokens; in texts without
                  questions, each format is also forced to plain's tokens
reading           no engine: `eval/reading` goes through the texts, and for each of them through the formats
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_kvq.eval.bits import bits_without_engine
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import named, of_server
from vllm_kvq.eval.engine.engines import Engine, EngineFailed
from vllm_kvq.eval.engine.jobs import Score, Tokens
from vllm_kvq.eval.engine.logprobs import Logprobs, divergence, joined
from vllm_kvq.eval.results.result import READING, TEACHER_FORCED
from vllm_kvq.eval.run.comparison import REFERENCE
from vllm_kvq.eval.run.plan import Plan
from vllm_kvq.eval.run.store import Arrays, Store
from vllm_kvq.eval.tasks.samples import Sequence

FIGURES, WHOLE, BITS = "figures", "whole", "bits"
"""Kinds of entries: numbers of single tokens, whole distributions, bits per element."""
Progress = Callable[[str, int], None]
"""Called with what is being done, and the number of new figures since the last call."""
Missing = Mapping[Choice, list[Sequence]]


@dataclass
class Run:
    plan: Plan
    store: Store
    progress: Progress
    problems: dict[str, str] = field(default_factory=dict)
    """Why a format has no figures, by its label."""

    def go(self) -> None:
        for choice in filter(of_server, self.plan.choices):
            self.progress(f"{choice.label}: constants", 0)
            named(choice, self.plan.servers)
        for regime in self.plan.regimes:
            missing = {choice: self._missing(choice, regime) for choice in self.plan.choices}
            if regime == READING:
                self._reading(missing)
            elif any(missing.values()):
                self._teacher_forced(missing) if regime == TEACHER_FORCED else self._decoding(missing, regime)
        for choice in self.plan.choices:
            for item in self.plan.sequences:
                for regime in self.plan.regimes:
                    self.store.drop(WHOLE, self.plan.key(choice, item, regime))

    def figures(self, choice: Choice, item: Sequence, regime: str) -> Arrays | None:
        return self.store.get(FIGURES, self.plan.key(choice, item, regime))

    def bits(self, choice: Choice, context: int) -> float | None:
        found = self.store.get(BITS, self.plan.bits_key(choice, context))
        return None if found is None else float(found["bits"])

    def _missing(self, choice: Choice, regime: str) -> list[Sequence]:
        kept = [self.store.has(FIGURES, self.plan.key(choice, item, regime)) for item in self.plan.sequences]
        self.progress(choice.label, sum(kept))
        return [item for item, there in zip(self.plan.sequences, kept, strict=True) if not there]

    def _keep(self, choice: Choice, item: Sequence, regime: str, figures: Arrays) -> None:
        self.store.put(FIGURES, self.plan.key(choice, item, regime), figures)
        self.progress(f"{choice.label}, {regime}: {item.task}, {item.context} tokens", 1)

    def _whole(self, choice: Choice, item: Sequence, regime: str) -> Logprobs:
        return Logprobs.of(self._entry(choice, item, regime))

    def _entry(self, choice: Choice, item: Sequence, regime: str) -> Arrays:
        found = self.store.get(WHOLE, self.plan.key(choice, item, regime))
        if found is None:
            raise RuntimeError("distributions have vanished from the cache: does another run use the same folder?")
        return found

    def _with_engine(self, choice: Choice, regime: str, work: Callable[[Engine], None]) -> None:
        """Any other format's failure is its row's problem; without the plain cache there is no baseline."""
        self.progress(f"{choice.label}, {regime}: starting", 0)
        try:
            with Engine(self.plan.engine(choice, regime)) as engine:
                for length, bits in engine.started.bits.items():
                    self.store.put(BITS, self.plan.bits_key(choice, length), {"bits": np.array(bits)})
                work(engine)
        except EngineFailed as error:
            if choice == REFERENCE:
                raise
            self.problems[choice.label] = str(error)

    # -- reading -----------------------------------------------------------------------------------------------------
    def _reading(self, missing: Missing) -> None:
        from vllm_kvq.eval.run.reading import read

        plan = self.plan
        todo = [(item, [c for c in plan.choices if item in missing[c]]) for item in plan.sequences]
        todo = [(item, choices) for item, choices in todo if choices]
        if todo:
            self.progress(f"{READING}: loading the model", 0)
            read(plan, todo, lambda choice, item, found: self._keep(choice, item, READING, found), self._refuse)
        for choice in plan.choices:
            for context in plan.contexts:
                if choice.label not in self.problems and self.bits(choice, context) is None:
                    self.progress(f"{choice.label}: bits at {context} tokens", 0)
                    found = bits_without_engine(str(plan.model.folder), choice, plan.model.dtype, context)
                    if found is not None:
                        self.store.put(BITS, plan.bits_key(choice, context), {"bits": np.array(found)})

    def _refuse(self, choice: Choice, problem: str) -> None:
        self.problems[choice.label] = problem

    # -- teacher-forced ----------------------------------------------------------------------------------------------
    def _teacher_forced(self, missing: Missing) -> None:
        plan, regime = self.plan, TEACHER_FORCED
        needed = [item for item in plan.sequences if any(item in items for items in missing.values())]
        unscored = [item for item in needed if not self.store.has(WHOLE, plan.key(REFERENCE, item, regime))]

        def score(engine: Engine) -> None:
            for item in unscored:
                self.progress(f"{REFERENCE.label}, {regime}: {item.task}, {item.context} tokens", 0)
                found = engine.score(Score(item.tokens))
                self.store.put(WHOLE, plan.key(REFERENCE, item, regime), found.arrays())

        if unscored:
            self._with_engine(REFERENCE, regime, score)
        for choice, items in missing.items():
            if choice == REFERENCE and not plan.control:
                for item in items:
                    plain = self._whole(REFERENCE, item, regime)
                    self._keep(choice, item, regime, compared(plain, plain))
            elif items:
                self._with_engine(choice, regime, functools.partial(self._compare, choice, items))

    def _compare(self, choice: Choice, items: list[Sequence], engine: Engine) -> None:
        for item in items:
            found = engine.score(Score(item.tokens))
            self._keep(choice, item, TEACHER_FORCED, compared(self._whole(REFERENCE, item, TEACHER_FORCED), found))

    # -- decoding ----------------------------------------------------------------------------------------------------
    def _decoding(self, missing: Missing, regime: str) -> None:
        plan = self.plan
        # the continuations that formats are forced to follow are generated again if an earlier run has dropped them
        followed = {item for items in missing.values() for item in items if plan.follows(item, regime)}
        for choice, items in missing.items():
            wanted = [i for i in plan.sequences if i in items or (choice == REFERENCE and i in followed)]
            self._generate(choice, [item for item in wanted if not self._generated(choice, item, regime)], regime)
        # what could not be generated is the format's problem
        generated = {c: [item for item in items if self._generated(c, item, regime)] for c, items in missing.items()}
        if not plan.control:
            for item in generated.pop(REFERENCE):
                said = self._whole(REFERENCE, item, regime)
                self._keep(REFERENCE, item, regime, compared(said, said))
        if any(generated.values()):
            self._with_engine(REFERENCE, regime, functools.partial(self._judge, generated, regime))

    def _generated(self, choice: Choice, item: Sequence, regime: str) -> bool:
        return self.store.has(WHOLE, self.plan.key(choice, item, regime))

    def _generate(self, choice: Choice, items: list[Sequence], regime: str) -> None:
        def generate(engine: Engine) -> None:
            for batch in self.plan.batches(items):
                self._say(f"{choice.label}, {regime}", batch)
                forced = self._follow(choice, batch, regime, engine)
                for item, said in zip(
                    batch, self._answers(engine, batch, self._before(choice, batch, regime)), strict=True
                ):
                    entry = said.arrays() | forced.get(item, {})
                    self.store.put(WHOLE, self.plan.key(choice, item, regime), entry)

        if items:
            self._with_engine(choice, regime, generate)

    def _before(self, choice: Choice, batch: list[Sequence], regime: str) -> list[tuple[Tokens, ...]]:
        """What plain said in an earlier run, to be repeated exactly: in another batch it may round differently."""
        said = []
        for item in batch:
            figures = self.figures(choice, item, regime) if choice == REFERENCE else None
            lengths = self.plan.lengths(item)
            said.append(((),) * len(lengths) if figures is None else split(figures["token"], lengths))
        return said

    def _follow(self, choice: Choice, batch: list[Sequence], regime: str, engine: Engine) -> dict[Sequence, Arrays]:
        """The format's probabilities of plain's continuations, token by token."""
        items = [item for item in batch if choice != REFERENCE and self.plan.follows(item, regime)]
        plain = [self._whole(REFERENCE, item, regime) for item in items]
        said = [split(p.token, self.plan.lengths(item)) for p, item in zip(plain, items, strict=True)]
        found = self._answers(engine, items, said) if items else []
        return {item: following(p, f) for item, p, f in zip(items, plain, found, strict=True)}

    def _answers(
        self, engine: Engine, items: list[Sequence], said: list[tuple[Tokens, ...]] | None = None
    ) -> list[Logprobs]:
        """The distributions of each text, one after the other, without their leads."""
        runs = iter(engine.generate(self.plan.generate_all(items, said)))
        return [joined([next(runs).after(lead) for lead in self.plan.leads(item)]) for item in items]

    def _judge(self, generated: Missing, regime: str, engine: Engine) -> None:
        plan = self.plan
        for choice, items in generated.items():
            for batch in plan.batches(items):
                self._say(f"{choice.label}, {regime}, judged", batch)
                entries = [self._entry(choice, item, regime) for item in batch]
                said = [split(e["token"], plan.lengths(item)) for e, item in zip(entries, batch, strict=True)]
                for item, entry, plain in zip(batch, entries, self._answers(engine, batch, said), strict=True):
                    figures = compared(plain, Logprobs.of(entry)) | {n: entry[n] for n in FOLLOWING if n in entry}
                    self._keep(choice, item, regime, figures)
                    self.store.drop(WHOLE, plan.key(choice, item, regime))

    def _say(self, what: str, batch: list[Sequence]) -> None:
        names = ", ".join(dict.fromkeys(f"{item.task}, {item.context} tokens" for item in batch))
        self.progress(f"{what}: {names}", 0)


def split(tokens: np.ndarray, lengths: tuple[int, ...]) -> tuple[Tokens, ...]:
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    return tuple(tuple(map(int, part)) for part in parts)


def compared(plain: Logprobs, found: Logprobs) -> Arrays:
    """Numbers of single tokens, from which rows are made."""
    return {
        "token": found.token,
        "kl": divergence(plain, found).astype(np.float64),
        "chosen": found.chosen,
        "chosen_plain": plain.chosen,
        "same": plain.best == found.best,
        "hit": found.best == found.token,
    }


FOLLOWING = ("kl_forced", "same_forced")


def following(plain: Logprobs, found: Logprobs) -> Arrays:
    """The same for tokens that plain has generated."""
    return {
        "kl_forced": divergence(plain, found).astype(np.float64),
        "same_forced": plain.best == found.best,
    }

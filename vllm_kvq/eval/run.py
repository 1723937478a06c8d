"""Carries a plan out: one engine after the other, each number kept as soon as it is there.

teacher-forced    plain scores every text; each format scores it, too, and is compared at once
decoding, hits    plain generates; each format generates; plain is made to say what each format said
reading           no engine: `eval/reading` goes through the texts, and through the formats for each of them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_kvq.eval.bits import bits_without_engine
from vllm_kvq.eval.cache import Arrays, Store
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.engines import Engine, EngineFailed
from vllm_kvq.eval.jobs import Score, Tokens
from vllm_kvq.eval.logprobs import Logprobs, divergence, joined
from vllm_kvq.eval.plan import REFERENCE, Plan
from vllm_kvq.eval.result import READING, TEACHER_FORCED
from vllm_kvq.eval.samples import Sequence

FIGURES, WHOLE, BITS = "figures", "whole", "bits"
"""Kinds of entries: numbers of single tokens, whole distributions, bits per element."""
Progress = Callable[[str, int], None]
"""Called with what is being done, and how many figures are there since the last call."""
Missing = Mapping[Choice, list[Sequence]]


@dataclass
class Run:
    plan: Plan
    store: Store
    progress: Progress
    problems: dict[str, str] = field(default_factory=dict)
    """Why a format has no figures, by its label."""

    def go(self) -> None:
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
        found = self.store.get(WHOLE, self.plan.key(choice, item, regime))
        if found is None:
            raise RuntimeError("distributions have vanished from the cache: does another run use the same folder?")
        return Logprobs.of(found)

    def _with_engine(self, choice: Choice, regime: str, work: Callable[[Engine], None]) -> None:
        """Any other format's failure is a row's problem; without the plain cache there is nothing to compare with."""
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
        from vllm_kvq.eval.reading.run import read

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
        for choice, items in missing.items():
            self._generate(choice, [item for item in items if not self._generated(choice, item, regime)], regime)
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
            for item in items:
                self.progress(f"{choice.label}, {regime}: {item.task}, {item.context} tokens", 0)
                said = self._answers(engine, item)
                self.store.put(WHOLE, self.plan.key(choice, item, regime), said.arrays())

        if items:
            self._with_engine(choice, regime, generate)

    def _answers(self, engine: Engine, item: Sequence, said: tuple[Tokens, ...] | None = None) -> Logprobs:
        """One after the other, without their leads."""
        runs = engine.generate(self.plan.generate(item, said))
        return joined([run.after(lead) for run, lead in zip(runs, self.plan.leads(item), strict=True)])

    def _judge(self, generated: Missing, regime: str, engine: Engine) -> None:
        plan = self.plan
        for choice, items in generated.items():
            for item in items:
                said = self._whole(choice, item, regime)
                plain = self._answers(engine, item, split(said.token, plan.lengths(item)))
                self._keep(choice, item, regime, compared(plain, said))
                self.store.drop(WHOLE, plan.key(choice, item, regime))


def split(tokens: np.ndarray, lengths: tuple[int, ...]) -> tuple[Tokens, ...]:
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    return tuple(tuple(map(int, part)) for part in parts)


def compared(plain: Logprobs, found: Logprobs) -> Arrays:
    """Numbers of single tokens: what rows are made of."""
    return {
        "token": found.token,
        "kl": divergence(plain, found).astype(np.float64),
        "chosen": found.chosen,
        "chosen_plain": plain.chosen,
        "same": plain.best == found.best,
        "hit": found.best == found.token,
    }

"""One run of the fuzzer: formats in turn, one engine per core at a time, until time is up or enough requests are
judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from proof.fuzz.attempt import Runner, Runners
from proof.fuzz.case import Case
from proof.fuzz.draw import Drawer, draw_setup
from proof.fuzz.kinds import LLAMA, draw_model, judged
from proof.fuzz.shrink import Shrinker, last_good
from proof.oracle.engines.forked import Prepare
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict

ROUND_SECONDS = 60.0
"""The approximate time for which one configuration is kept."""
EPISODE = 4
"""Traces that share a prefix cache, and that are shrunk together."""
PLAIN_SHARE = 0.4
"""The part of a round under `lossless` in which plain vLLM runs the same traces."""


@dataclass
class Count:
    """The counts of runs under one format, and their results."""

    traces: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    models: dict[str, int] = field(default_factory=dict)
    """The number of engines with each kind of model."""

    @property
    def engines(self) -> int:
        return sum(self.models.values())


@dataclass
class Finding:
    case: Case
    longer: Case
    """With everything that the engine had run before, in case the failure depends on it."""
    messages: list[str]


@dataclass(frozen=True)
class Round:
    format: str
    number: int

    def rng(self, seed: int, what: str) -> Random:
        return Random(f"{seed}/{self.format}/{self.number}/{what}")


class Session:
    def __init__(
        self,
        model: str,
        seed: int,
        seconds: float,
        formats: Sequence[str],
        jobs: int,
        prepare: Prepare | None = None,
        episode: int = EPISODE,
        requests: int | None = None,
        runner: str | None = None,
        models: Sequence[str] = (LLAMA,),
    ) -> None:
        """Stops after `seconds`, or once `requests` are judged, however long that takes. `runner`: see `draw_setup`."""
        self.runner, self.models = runner, models
        self.model, self.seed, self.jobs, self.prepare, self.episode = model, seed, jobs, prepare, episode
        self.end = time.monotonic() + seconds
        self.counts = {name: Count() for name in formats}
        self.finding: Finding | None = None
        self.error: BaseException | None = None
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.requests, self.turns = requests, max(1, round(seconds * jobs / (ROUND_SECONDS * len(formats))))
        """The number of rounds over all formats, if there is a time limit."""

    def run(self) -> None:
        lanes = [threading.Thread(target=self._lane, args=(i,)) for i in range(self.jobs)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if self.error is not None:
            raise self.error

    @property
    def judged(self) -> int:
        with self.lock:
            return sum(count.verdict.requests for count in self.counts.values())

    @property
    def over(self) -> bool:
        done = time.monotonic() >= self.end if self.requests is None else self.judged >= self.requests
        return self.stop.is_set() or done

    def _rounds(self, lane: int) -> Iterator[tuple[Round, float]]:
        """A lane's rounds, and the time at which each of them must end."""
        formats = list(self.counts)
        mine = range(lane, self.turns * len(formats), self.jobs) if self.requests is None else count(lane, self.jobs)
        for i, number in enumerate(mine):
            now, seconds = time.monotonic(), ROUND_SECONDS
            if self.requests is None:
                seconds = max(0.0, self.end - now) / (len(mine) - i)  # type: ignore[arg-type]
            yield Round(formats[number % len(formats)], number // len(formats)), now + seconds

    def _lane(self, number: int) -> None:
        try:
            for this, end in self._rounds(number):
                # every format runs at least once, however slow the machine
                if self.stop.is_set() or (self.over and this.number > 0):
                    break
                self._round(this, end)
        except BaseException as error:
            self.error = error
            self.stop.set()

    def _round(self, this: Round, end: float) -> None:
        model = draw_model(this.rng(self.seed, "model"), judged(self.models, this.format))
        setup = draw_setup(this.rng(self.seed, "setup"), this.format, self.runner, model)
        runner = Runner(self.model, setup, self.prepare)
        traces: list[Trace] = []
        results: list[Result] = []
        if this.format == "lossless":
            end -= PLAIN_SHARE * (end - time.monotonic())
        try:
            self._count(this, 0, Verdict(), engine=model)
            episode = 0
            while not episode or (not self.over and time.monotonic() < end):
                drawer = Drawer(this.rng(self.seed, f"traces {episode}"), setup)
                # only one trace for a format whose first round begins after the end, and for a slow runner
                count = 1 if self.over or setup.runner == "V2" else self.episode
                new = [drawer.trace(f"e{episode}t{i}", reset=i == 0) for i in range(count)]
                answers, verdict = runner.run(new)
                traces, results, episode = traces + new, results + answers, episode + 1
                self._count(this, count, verdict)
                if verdict.mismatches:
                    return self._found(Case(setup, tuple(new)), Case(setup, tuple(traces)), verdict)
            if this.format == "lossless":
                for i in range(0, len(traces), self.episode):
                    new = traces[i : i + self.episode]
                    verdict = runner.against_plain(new, results[i : i + self.episode])
                    self._count(this, 0, verdict)
                    if verdict.mismatches:
                        return self._found(Case(setup, tuple(new)), Case(setup, tuple(traces)), verdict)
        finally:
            runner.close()

    def _count(self, this: Round, traces: int, verdict: Verdict, engine: str | None = None) -> None:
        """`engine`: the model of one that has just started."""
        with self.lock:
            count = self.counts[this.format]
            if engine is not None:
                count.models[engine] = count.models.get(engine, 0) + 1
            count.traces += traces
            count.verdict.add(verdict)

    def _found(self, case: Case, longer: Case, verdict: Verdict) -> None:
        """The first finding stops the session."""
        with self.lock:
            if self.finding is None:
                self.finding = Finding(case, longer, verdict.mismatches)
        self.stop.set()


def minimal(model: str, finding: Finding, seconds: float, prepare: Prepare | None = None) -> tuple[Case, list[str]]:
    """The smallest case found within the time, and what is wrong with it on a fresh engine."""
    runners = Runners(model, prepare)
    try:
        # the failure may depend on what the engine ran before; then all of that is the case
        case = next((c for c in (finding.case, finding.longer) if runners.judge(c, fresh=True).mismatches), None)
        if case is None:
            return finding.longer, finding.messages
        end = time.monotonic() + seconds  # not before: on a busy machine the judgement above may take as long

        def over() -> bool:
            return time.monotonic() > end

        def wrong_on_a_fresh_engine(c: Case) -> bool:
            return bool(runners.judge(c, fresh=True).mismatches)

        shrinker = Shrinker(case, lambda c: bool(runners.judge(c).mismatches), over)
        shrinker.run()
        # what other cases left in the engine may have made a small one fail
        small = last_good(shrinker.path, wrong_on_a_fresh_engine)
        if small != shrinker.path[-1]:
            small = Shrinker(small, wrong_on_a_fresh_engine, over).run()
        messages = runners.judge(small, fresh=True).mismatches
        return (small, messages) if messages else (finding.case, finding.messages)
    finally:
        runners.close()

"""Runs traces on one configuration and judges them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

from proof.fuzz.case import MAX_LEN, Case, Setup
from proof.fuzz.kinds import LLAMA
from proof.models.checkpoints import copy_tokenizer, written_beside
from proof.models.copies import COPIES, tokenizer_of
from proof.models.draft import random_draft
from proof.models.seeing import SEEING
from proof.oracle.compare import differences
from proof.oracle.engines.forked import EngineFailed, EngineProcess, Prepare
from proof.oracle.judge import GREEDY, NEVER, distance, judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict, leaks
from vllm_kvq.formats.table import PLAIN

CLOSE = 1e-3
"""Two logits closer than this (their standard deviation is 30) may swap their order in float32."""
SECONDS, LONG_SECONDS = 1800.0, 3600.0
"""What a trace may take, and one of long prompts: with PyTorch kernels, 64 requests take minutes of a busy core."""


_writing = threading.Lock()


def draft_of(model: str) -> str:
    """The path of the model's draft, which is written next to it at first use."""
    path = Path(f"{model}-draft")
    with _writing:
        if not path.exists():
            random_draft(path, model)
    return str(path)


def checkpoint_of(setup: Setup, llama: str) -> str:
    """The path of the model, which is written next to `llama` at first use, unless it is `llama` itself."""
    name = setup.model
    if name == LLAMA:
        return llama
    if name in SEEING:
        complete = SEEING[name].complete
    else:
        complete = functools.partial(copy_tokenizer, tokenizer_of(name) if name in COPIES else llama)
    return written_beside(llama, setup.arch, complete)


def counted(traces: Sequence[Trace], results: Sequence[Result]) -> Verdict:
    """Checks that need no reference."""
    total = Verdict()
    for trace, result in zip(traces, results, strict=True):
        tokens = sum(len(sample) for samples in result.outputs.values() for sample in samples)
        hits = [n for n in result.cached.values() if n]
        total.add(Verdict(len(trace.requests), tokens, hits=len(hits), hit_tokens=sum(hits)))
        total.preemptions += result.preemptions
        total.mismatches += result.changed
    return total


class Runner:
    """One configuration's engine, the reference that judges it and, for `lossless`, plain vLLM as well."""

    def __init__(self, model: str, setup: Setup, prepare: Prepare | None = None) -> None:
        """`model`: the Llama of every run; others are written next to it."""
        self.model = checkpoint_of(setup, model)
        self.setup, self.prepare = setup, prepare
        self.engines: dict[str, EngineProcess] = {}

    @functools.cached_property
    def reference(self) -> ReplayModel:
        """For a model that it knows. It reads the constants that the engine's first start left."""
        setup = self.setup
        return ReplayModel(self.model, setup.format, setup.block_size, setup.drafts, setup.kernel_error, **setup.kvq)

    def engine(self, name: str) -> EngineProcess:
        """Ours, or plain vLLM's, started at first use."""
        if name not in self.engines:
            setup, prepare = (self.setup, self.prepare) if name != PLAIN else (self.setup.plain(), None)
            draft = draft_of(self.model) if setup.draft_model else ""
            engine = EngineProcess(self.model, setup.arguments(draft), setup.variables, prepare)
            engine.timeout = max(engine.timeout, LONG_SECONDS if setup.max_len > MAX_LEN else SECONDS)
            self.engines[name] = engine
        return self.engines[name]

    def run(self, traces: Sequence[Trace]) -> tuple[list[Result], Verdict]:
        """Every token judged by the reference, if it knows the model; an engine that fails is a mismatch."""
        results: list[Result] = []
        try:
            for trace in traces:
                results.append(self.engine(self.setup.format).run(trace))
        except EngineFailed as error:
            self.close()
            return results, Verdict(mismatches=[f"the engine failed: {error}"])
        verdict = judge(self.reference, traces, results) if self.setup.arch.replay else counted(traces, results)
        verdict.mismatches += [leak for r in results for leak in leaks(r)]
        return results, verdict

    def against_plain(self, traces: Sequence[Trace], results: Sequence[Result]) -> Verdict:
        """`lossless`: every token must be plain vLLM's on the same traces."""
        total = Verdict()
        for trace, result in zip(traces, results, strict=True):
            temperature = {r.name: r.temperature for r in trace.requests}
            for found in differences(trace, self.engine(PLAIN).run(trace), result):
                near = max(CLOSE, NEVER * min(GREEDY, temperature[found.request]))
                if self.setup.arch.replay and distance(self.reference, traces, results, found) < near:
                    total.ties += 1
                else:
                    total.mismatches.append(f"{found}; plain vLLM and lossless: {found.tokens}")
        return total

    def judge(self, traces: Sequence[Trace]) -> Verdict:
        """Against the reference and, under `lossless`, against plain vLLM."""
        results, verdict = self.run(traces)
        if self.setup.format == "lossless" and not verdict.mismatches:
            verdict.add(self.against_plain(traces, results))
        return verdict

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()


class Runners:
    """Judges cases; keeps the engine of the last configuration."""

    def __init__(self, model: str, prepare: Prepare | None = None) -> None:
        self.model, self.prepare = model, prepare
        self.runner: Runner | None = None

    def judge(self, case: Case, fresh: bool = False) -> Verdict:
        if self.runner is None or fresh or self.runner.setup != case.setup:
            self.close()
            self.runner = Runner(self.model, case.setup, self.prepare)
        return self.runner.judge(case.traces)

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None

"""Cases that are listed beforehand, each judged on an engine of its own: the sweeps that are not drawn by chance."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from proof.fuzz.case import MODEL, Case
from proof.fuzz.kinds import LLAMA
from proof.fuzz.main import COLUMNS, at_a_time, row, table
from proof.fuzz.session import Count
from vllm_kvq.kernels.cpu.processor import processor_name


@dataclass(frozen=True)
class Judged:
    rows: Mapping[str, Mapping[str, int]]
    """By label, and "total"."""
    minutes: float
    jobs: int
    findings: Sequence[tuple[Case, Sequence[str]]]

    @property
    def how(self) -> str:
        return f"{self.minutes:.0f} minutes on {processor_name()}, {at_a_time(self.jobs)}."

    @property
    def table(self) -> str:
        return table(self.rows)

    def say(self) -> int:
        """Prints it; the exit status."""
        print(self.table, f"{self.minutes:.0f} minutes", sep="\n", flush=True)
        for case, messages in self.findings[:1]:
            print(f"\nMISMATCH: {'; '.join(messages[:3])}")
            print("save the next line in a file and run it again with: python -m proof fuzz --replay FILE")
            print(json.dumps(case.to_json()))
        return int(bool(self.findings))


def judge_listed(cases: Sequence[tuple[str, Case]], jobs: int) -> Judged:
    """Each with a label, for which the table has a row; `jobs` at a time."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # engines that are done are killed, and multiprocessing warns of the semaphores that they leave behind
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    import torch
    from transformers.utils.logging import disable_progress_bar

    from proof.fuzz.attempt import Runner
    from vllm_kvq.bench.models.random_model import random_model
    from vllm_kvq.kernels.cpu.library import library

    library()  # compiles if the sources have changed: the engines' time limits do not allow for that
    torch.set_num_threads(1)
    disable_progress_bar()
    counts = {label: Count() for label, _ in cases}
    findings: list[tuple[Case, Sequence[str]]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvq-listed-") as folder:

        def model_of(case: Case) -> str:
            path = Path(folder) / ("model" if case.setup.llama is MODEL else "long")
            if not path.exists():
                random_model(path, **case.setup.llama)
            return str(path)

        for _, case in cases:
            model_of(case)  # written before engines start side by side

        def judge(labelled: tuple[str, Case]) -> None:
            label, case = labelled
            runner = Runner(model_of(case), case.setup)
            try:
                verdict = runner.judge(case.traces)
            finally:
                runner.close()
            if verdict.mismatches:
                findings.append((case, verdict.mismatches))
            count = counts[label]
            count.traces += len(case.traces)
            count.verdict.add(verdict)
            count.models[LLAMA] = count.models.get(LLAMA, 0) + 1
            done = sum(c.engines for c in counts.values())
            print(f"{label}: {len(verdict.mismatches)} mismatches; {done} of {len(cases)} engines", file=sys.stderr)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(judge, cases))
    rows = {label: row(count) for label, count in counts.items()}
    rows["total"] = {c: sum(r[c] for r in rows.values()) for c in COLUMNS}
    return Judged(rows, (time.monotonic() - begun) / 60, jobs, findings)

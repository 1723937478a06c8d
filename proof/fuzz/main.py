"""The command `python -m proof fuzz`.

    python -m proof fuzz --seed 1 --minutes 10           the formats in turn, until time is up
    python -m proof fuzz --requests 10000 --report FILE  until 10000 requests are judged; the table goes to FILE
    python -m proof fuzz --replay FILE                   one case, as it is printed after a mismatch

Exits with 1 on a mismatch, after printing the seed and the smallest case that it found.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from proof.fuzz.case import MODEL, Case
from proof.fuzz.kinds import MODELS, judged
from proof.models.copies import COPIES, copy
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.table import suite
from vllm_kvq.kernels.cpu.processor import processor_name

COLUMNS = (
    "engines", "traces", "requests", "tokens", "preemptions", "hits", "hit_tokens", "accepted", "rejected", "aborts",
    "stops", "ties", "mismatches",
)  # fmt: skip


def default() -> list[str]:
    """A format of each method, and the one that must give plain vLLM's tokens."""
    return [*suite("methods"), "lossless"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False,
        prog="python -m proof fuzz", description="Random traces on real engines, every token judged.", epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=1.0)
    length.add_argument("--requests", type=int, metavar="N", help="number of requests to judge, however long it takes")
    parser.add_argument("--formats", type=words(sorted(FORMATS)), default=default(), metavar="FORMAT,...")
    parser.add_argument(
        "--models", type=words(MODELS), default=list(MODELS), metavar="NAME,...",
        help="kinds of models, by their names in docs/models.md, of which each engine has one",
    )  # fmt: skip
    parser.add_argument(
        "--copies", action="store_true",
        help="tiny copies of the real models in KVQ_WEIGHTS (python -m proof weights), too, with their tokenizers",
    )  # fmt: skip
    parser.add_argument("--runner", choices=("V1", "V2"), help="vLLM's model runner (drawn)")
    text = "concurrent engines (default: the number of cores)"
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help=text)
    parser.add_argument(
        "--shrink-minutes", type=float, default=3.0, help="maximum minutes of shrinking after a mismatch"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="file with a single case to run")
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and table")
    parser.add_argument(
        "--counts", type=Path, metavar="FILE", help="file for the counts, and for the case of a mismatch"
    )
    options = parser.parse_args(argv)
    if options.jobs < 1 or options.minutes <= 0:
        parser.error("--jobs and --minutes must be positive")
    if options.requests is not None and options.requests < 1:
        parser.error("--requests must be positive")
    try:
        options.models += [copy(name).name for name in COPIES if options.copies]
    except ValueError as error:
        parser.error(f"--copies: {error}")
    for name in options.formats:
        if not judged(options.models, name):
            parser.error(f"--models {','.join(options.models)}: the reference can't judge {name} there, only lossless")
    for name in ("report", "copies"):
        if getattr(options, name) and options.replay:
            parser.error(f"--{name} is for a run, not for one case")
    try:
        case = Case.from_json(json.loads(options.replay.read_text(encoding="utf-8"))) if options.replay else None
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"--replay {options.replay} holds no case: {error}")
    os.environ["OMP_NUM_THREADS"] = "1"
    # engines that are no longer needed are killed, and multiprocessing warns of the semaphores that they leave behind
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvq-fuzz-") as folder:
        from vllm_kvq.bench.models.random_model import random_model

        model = str(random_model(Path(folder) / "model", **(case.setup.llama if case else MODEL)))
        return replay(model, case) if case else fuzz(model, options)


def at_a_time(jobs: int) -> str:
    return f"{jobs} engine{'s' * (jobs > 1)} at a time"


def fuzz(model: str, options: argparse.Namespace) -> int:
    from proof.fuzz.session import Session, minimal
    from vllm_kvq.kernels.cpu.library import library

    library()  # compiles if the sources have changed: the engines' time limits do not allow for that
    session = Session(
        model, options.seed, 60 * options.minutes, options.formats, options.jobs, requests=options.requests,
        runner=options.runner, models=options.models,
    )  # fmt: skip
    begun = time.monotonic()
    session.run()
    minutes = (time.monotonic() - begun) / 60
    rows = {name: row(count) for name, count in session.counts.items()}
    rows["total"] = {c: sum(row[c] for row in rows.values()) for c in COLUMNS}
    print(f"seed {options.seed}, {minutes:.0f} minutes, {at_a_time(options.jobs)}")
    print(table(rows), flush=True)
    engines = Counter[str]()
    for count in session.counts.values():
        engines.update(count.models)
    models = ", ".join(f"{name} {n}" for name, n in engines.most_common())
    print(f"models of the engines: {models}", flush=True)
    if options.report:
        options.report.write_text(write_up(options, minutes, rows, models), encoding="utf-8")
    report: dict[str, Any] = {"seed": options.seed, "minutes": options.minutes, "counts": rows}
    if session.finding is not None:
        print(f"\nMISMATCH (seed {options.seed}): {_text(session.finding.messages)}\nshrinking ...", flush=True)
        case, messages = minimal(model, session.finding, 60 * options.shrink_minutes)
        requests, tokens = case.size
        print(f"smallest case found: {requests} requests, {tokens} tokens; {_text(messages)}")
        print("save the next line in a file and run it again with: python -m proof fuzz --replay FILE")
        print(json.dumps(case.to_json()))
        report |= {"case": case.to_json(), "messages": messages}
    if options.counts:
        options.counts.write_text(json.dumps(report), encoding="utf-8")
    return int(session.finding is not None)


def replay(model: str, case: Case) -> int:
    from proof.fuzz.attempt import Runners

    runners = Runners(model)
    try:
        verdict = runners.judge(case)
    finally:
        runners.close()
    counts = {f.name: getattr(verdict, f.name) for f in fields(verdict) if f.name != "mismatches"}
    print(" ".join(f"{name}={value}" for name, value in counts.items() if value))
    print("\n".join(verdict.mismatches) or "no mismatch")
    return int(bool(verdict.mismatches))


def write_up(options: argparse.Namespace, minutes: float, rows: Mapping[str, Mapping[str, int]], models: str) -> str:
    """A page of docs/results."""
    length = f"--minutes {options.minutes:g}" if options.requests is None else f"--requests {options.requests}"
    command = f"python -m proof fuzz --seed {options.seed} {length}"
    if options.runner:
        command += f" --runner {options.runner}"
    kinds = [name for name in options.models if name not in COPIES]
    if kinds != list(MODELS):
        command += f" --models {shlex.quote(','.join(kinds))}"
    if options.copies:
        command += " --copies"
    if options.formats != default():
        command += f" --formats {','.join(options.formats)}"
    cores, total = len(os.sched_getaffinity(0)), rows["total"]
    requests = ", ".join(f"{n:,} {what}" for n, what in ((total["requests"], "requests"), (total["tokens"], "tokens")))
    lines = table(rows).splitlines()
    return f"""# Random traces on real engines

{requests} of random traces, each token judged by the reference (docs/testing.md). Mismatches: {total["mismatches"]}.
{minutes:.0f} minutes on {cores} cores of {processor_name()}; {at_a_time(options.jobs)}.

    {command}

{chr(10).join("    " + line for line in lines)}

Models of the engines (docs/models.md): {models}.

A *tie* is a token that the reference chooses as well once it is disturbed by what float32 rounds.
"""


def row(count: Any) -> dict[str, int]:
    found = {"engines": count.engines, "traces": count.traces}
    for name in COLUMNS[2:]:
        value = getattr(count.verdict, name)
        found[name] = len(value) if name == "mismatches" else value
    return found


def table(rows: Mapping[str, Mapping[str, int]]) -> str:
    width = {c: max(len(c), *(len(str(row[c])) for row in rows.values())) for c in COLUMNS}
    first = 2 + max(map(len, rows))
    lines = [f"{'':{first}}" + "  ".join(c.rjust(width[c]) for c in COLUMNS)]
    lines += [f"{name:{first}}" + "  ".join(str(row[c]).rjust(width[c]) for c in COLUMNS) for name, row in rows.items()]
    return "\n".join(lines)


def _text(messages: list[str]) -> str:
    more = f" and {len(messages) - 3} more" if len(messages) > 3 else ""
    return "; ".join(messages[:3]) + more

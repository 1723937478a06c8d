"""The command `python -m proof long`.

    python -m proof weights .weights smollm2-135m
    python -m proof long .weights/smollm2-135m                 50 prompts of 1,024 to 8,192 tokens, half an hour or more
    python -m proof long .weights/smollm2-135m --prompts 6     a first look
    python -m proof long MODEL --report FILE                   the findings go to FILE, a page of docs/results

`lossless` keeps keys and values bit for bit, through the code that all formats share. In float32 its greedy answers
must be plain vLLM's: prompts in chunks, three requests at a time, prefix hits. Exits with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proof.long.prompts import LONGEST, SHORTEST, traces_of
from proof.oracle.compare import compare_all
from proof.oracle.engines.forked import EngineFailed, EngineProcess
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.tasks.texts import Texts
from vllm_kvq.kernels.cpu.processor import processor_name

TRACE_SECONDS = 3600
CHUNK = 512
ROOM = 2
"""Requests of the maximum length that plain vLLM's cache holds: of three long ones, one waits."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof long",
        description="Long prompts of real text on a real model: `lossless` against plain vLLM, token by token.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="checkpoint folder")
    parser.add_argument("--prompts", type=int, default=50, help="number of prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens per answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and findings")
    options = parser.parse_args(argv)
    if options.prompts < 1 or options.tokens < 1:
        parser.error("--prompts and --tokens must be positive")
    try:
        model = Model.of(str(options.model), "float32")
        longest = min(LONGEST, model.longest - options.tokens - 1)
        traces = traces_of(Texts(model.tokenizer, options.seed), options.prompts, options.tokens, options.seed, longest)
    except ValueError as error:
        parser.error(str(error))
    begun = time.monotonic()
    try:
        verdict = judge(model, traces)
    except EngineFailed as error:
        print(f"long: an engine failed\n{error}", file=sys.stderr)
        return 1
    found = summary(verdict, traces, (time.monotonic() - begun) / 60)
    print(found, *verdict.mismatches, sep="\n", flush=True)
    if options.report:
        options.report.write_text(page(options, found, verdict), encoding="utf-8")
    return int(bool(verdict.mismatches))


def judge(model: Model, traces: Sequence[Trace]) -> Verdict:
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(2) as pool:
        plain, ours = pool.map(lambda name: answers(model, name, traces), ("auto", "lossless"))
    return compare_all(traces, plain, ours)


def answers(model: Model, name: str, traces: Sequence[Trace]) -> list[Result]:
    longest = max(len(r.prompt) + r.max_tokens for trace in traces for r in trace.requests)
    arguments = {"max_model_len": longest + 1, "max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    arguments |= {"kv_cache_memory_bytes": ROOM * longest * model.token_bytes}
    with EngineProcess(str(model.folder), {"kv_cache_dtype": name, **arguments}, {}) as engine:
        engine.timeout = TRACE_SECONDS
        found = []
        for i, trace in enumerate(traces):
            found.append(engine.run(trace))
            print(f"{name}: {i + 1} of {len(traces)} traces", flush=True)
        return found


def summary(verdict: Verdict, traces: Sequence[Trace], minutes: float) -> str:
    lengths = sorted(len(r.prompt) for trace in traces for r in trace.requests)
    middle = lengths[len(lengths) // 2]
    return (
        f"{verdict.requests} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens (half of them {middle:,} or more), "
        f"{verdict.tokens:,} tokens answered, {verdict.hits} prefix hits, {verdict.preemptions} preemptions, "
        f"{len(verdict.mismatches)} mismatches; {minutes:.0f} minutes"
    )


def page(options: argparse.Namespace, found: str, verdict: Verdict) -> str:
    command = f"python -m proof long .weights/{options.model.name}"
    command += "".join(
        f" --{name} {getattr(options, name)}"
        for name, usual in (("prompts", 50), ("tokens", 64), ("seed", 0))
        if getattr(options, name) != usual
    )
    mismatches = "".join(f"* {line}\n" for line in verdict.mismatches)
    return f"""# Long prompts on a real model

Prompts of real text ({SHORTEST:,} to {LONGEST:,} tokens; prose, documentation, code, chats), cut into chunks of
{CHUNK}, three at a time; a third of them begins like another one. Under `lossless`, in float32, every token of the
greedy answers must be plain vLLM's (docs/testing.md).

{options.model.name}: {found}
on {processor_name()}.

    {command}
{mismatches and chr(10) + mismatches}"""


if __name__ == "__main__":
    raise SystemExit(main())

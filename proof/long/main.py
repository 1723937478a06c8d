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
from typing import Any

from proof.fuzz.main import processor
from proof.long.prompts import LONGEST, SHORTEST, traces_of
from proof.oracle.compare import compare_all
from proof.oracle.forked import EngineFailed, EngineProcess
from proof.oracle.trace import Result, Trace
from proof.oracle.verdict import Verdict

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
    parser.add_argument("--prompts", type=int, default=50, help="how many (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="per answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and findings")
    options = parser.parse_args(argv)
    if not (options.model / "config.json").exists():
        parser.error(f"{options.model} has no config.json; python -m proof weights OUT brings models")
    if options.prompts < 1 or options.tokens < 1:
        parser.error("--prompts and --tokens must be positive")
    begun = time.monotonic()
    try:
        verdict, traces = judge(options)
    except EngineFailed as error:
        print(f"long: an engine failed\n{error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(f"--prompts {options.prompts}: {error}")
    found = summary(verdict, traces, (time.monotonic() - begun) / 60)
    print(found, *verdict.mismatches, sep="\n", flush=True)
    if options.report:
        options.report.write_text(page(options, found, verdict), encoding="utf-8")
    return int(bool(verdict.mismatches))


def judge(options: argparse.Namespace) -> tuple[Verdict, list[Trace]]:
    from transformers import AutoConfig, AutoTokenizer

    from vllm_kvq.eval.tasks.texts import Texts

    config: Any = AutoConfig.from_pretrained(options.model)
    longest = min(LONGEST, config.max_position_embeddings - options.tokens - 1)
    texts = Texts(AutoTokenizer.from_pretrained(options.model), options.seed)
    traces = traces_of(texts, options.prompts, options.tokens, options.seed, longest)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(2) as pool:
        plain, ours = pool.map(lambda name: answers(options.model, name, config, traces), ("auto", "lossless"))
    return compare_all(traces, plain, ours), traces


def answers(model: Path, name: str, config: Any, traces: Sequence[Trace]) -> list[Result]:
    longest = max(len(r.prompt) + r.max_tokens for trace in traces for r in trace.requests)
    arguments = {"max_model_len": longest + 1, "max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    room = ROOM * longest * token_bytes(config)
    with EngineProcess(str(model), {"kv_cache_dtype": name, "kv_cache_memory_bytes": room, **arguments}, {}) as engine:
        engine.timeout = TRACE_SECONDS
        found = []
        for i, trace in enumerate(traces):
            found.append(engine.run(trace))
            print(f"{name}: {i + 1} of {len(traces)} traces", flush=True)
        return found


def token_bytes(config: Any) -> int:
    """Of keys and values in float32, in all layers."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * int(config.num_hidden_layers * config.num_key_value_heads * head)


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
on {processor()}.

    {command}
{mismatches and chr(10) + mismatches}"""


if __name__ == "__main__":
    raise SystemExit(main())

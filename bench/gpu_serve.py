"""`vllm serve` with each cache on one GPU: all servers are started at once and asked one after the other.

    python bench/gpu_serve.py --caches auto,fp8,klt3 --out docs/results/gpu-serve.csv

    MODEL           a Llama-3.1-8B with dummy weights and a small vocabulary: only times are measured. Or --model PATH
    first token     of one request after another, on prompts that the server hasn't seen
    token           only decoding: from a request's first token to its last; its prompt hits the prefix cache
    load            requests that no cache of these bytes holds all at once in bf16: output tokens per second, and how
                    often vLLM preempted a request

First token and token are medians over --rounds; the load runs once. Every server is asked the same. CUDA graphs are on,
torch.compile is off.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import torch

from vllm_kvq.bench.models.checkpoint import LlamaShape
from vllm_kvq.bench.models.tokenizer import made_up_tokenizer
from vllm_kvq.bench.servers.capacity import PREEMPTIONS, read_metrics
from vllm_kvq.bench.servers.serve import Turn, stream
from vllm_kvq.bench.servers.server import Server, ServerError, watched, with_cache

VOCAB = 4096
START_SECONDS = 300


@dataclass(frozen=True)
class Plan:
    shape: LlamaShape
    cells: tuple[tuple[int, int], ...]
    """Requests at the same time, and the tokens of each prompt."""
    tokens: int
    load: tuple[int, int]
    load_tokens: int
    options: tuple[str, ...]


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
REAL = Plan(
    LlamaShape(4096, 32, 32, 8, 128, 14336, VOCAB, 131072),
    ((1, 2048), (1, 32768), (8, 8192)),
    64,
    (32, 4096),
    128,
    ("--compilation-config", json.dumps(GRAPHS), "--max-num-seqs", "32"),
)
DRY = Plan(LlamaShape(vocab=VOCAB), ((1, 64), (2, 128)), 16, (3, 128), 16, ("--enforce-eager",))


@dataclass(frozen=True)
class Row:
    cache: str
    batch: int
    context: int
    first_ms: float
    token_ms: float
    tokens_per_second: float
    preemptions: int


def model(shape: LlamaShape, folder: Path) -> Path:
    """config.json and a tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    made_up_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(shape.config(torch.bfloat16)), encoding="utf-8")
    return folder


def prompt(tokens: int, seed: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(10, VOCAB, (tokens,), generator=rng).tolist()


def ask(url: str, prompts: Sequence[list[int]], tokens: int) -> list[Turn]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: stream(url, p, tokens), prompts))


def preemptions(url: str) -> int:
    return round(read_metrics(url).get(PREEMPTIONS, 0.0))


def measure(plan: Plan, cache: str, running: Server, rounds: int) -> Iterator[Row]:
    url = running.url
    with watched(running):
        ask(url, [prompt(300, 1)], 8)  # the first request compiles what start-up did not
        for batch, context in plan.cells:
            firsts, tokens = [], []
            for turn in range(rounds):
                prompts = [prompt(context, 1000 * context + 100 * turn + i) for i in range(batch)]
                firsts += [ask(url, [p], 2)[0].first for p in prompts]
                tokens += [t.step for t in ask(url, prompts, plan.tokens) if not math.isnan(t.step)]
            step = statistics.median(tokens) if tokens else math.nan
            yield Row(
                cache, batch, context, 1e3 * statistics.median(firsts), 1e3 * step, batch / step, preemptions(url)
            )
        (batch, context), before = plan.load, preemptions(url)
        prompts = [prompt(context, 7_000_000 + i) for i in range(batch)]
        start = time.perf_counter()
        turns = ask(url, prompts, plan.load_tokens)
        took = time.perf_counter() - start
        first = statistics.median(t.first for t in turns)
        lost = preemptions(url) - before
        yield Row(cache, batch, context, 1e3 * first, math.nan, batch * plan.load_tokens / took, lost)


def server(plan: Plan, cache: str, path: Path, cache_bytes: str, share: float, log: Path) -> Server:
    more = ["--kv-cache-memory-bytes", cache_bytes, "--gpu-memory-utilization", f"{share:.2f}", *plan.options]
    return with_cache(path, cache, max(c for _, c in plan.cells) + 256, log, more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", default="auto,fp8,klt3", help="(%(default)s)")
    parser.add_argument("--model", type=Path, help="a checkpoint; without it, dummy weights")
    parser.add_argument("--cache-bytes", default="8G", help="of each server (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model, also without a GPU: the times mean nothing"
    )
    args = parser.parse_args()
    caches, plan = args.caches.split(","), DRY if args.dry_run else REAL
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = args.model
    if path is None:
        path = model(plan.shape, Path(".demo/dummy"))
        plan = replace(plan, options=(*plan.options, "--load-format", "dummy"))
    failed = 0
    with ExitStack() as stack, args.out.open("w", newline="", encoding="utf-8") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow([f.name for f in fields(Row)])
        started = {}
        for cache in caches:
            log = Path(f".demo/gpu-serve-{cache}.log")
            share = 0.9 / len(caches)
            started[cache] = stack.enter_context(server(plan, cache, path, args.cache_bytes, share, log))
        for cache, one in started.items():
            try:
                one.wait_until_healthy(START_SECONDS)
                for row in measure(plan, cache, one, args.rounds):
                    print(row, flush=True)
                    write.writerow(astuple(row))
                    file.flush()
            except ServerError as error:
                failed = 1
                print(f"FAILED: {cache}: {error}", *error.log_tail, sep="\n", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""What fits at once in the same memory: `vllm serve` with each cache, one server at a time, under one closed load.

* All servers have the same bytes of cache (`--kv-cache-memory-bytes`), so what a format saves becomes more requests at
  the same time, which share each read of the weights: that is where a smaller cache pays most.
* The load is vLLM's own, `vllm bench serve`: random prompts of one length with a seed, every answer as long as asked
  for, and a new request as soon as one is done.
* The requests in flight are read from /metrics while it runs; their median counts. Preempted requests have lost their
  cache and are computed again.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from vllm_kvq.bench.servers.server import START_SECONDS, Server, ServerError, vllm_command, watched, with_cache
from vllm_kvq.formats.table import PLAIN, label

SAMPLE_SECONDS = 1.0
RUNNING, PREEMPTIONS = "vllm:num_requests_running", "vllm:num_preemptions_total"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
FITS = re.compile(r"KV cache size: ([\d,]+) tokens")


@dataclass(frozen=True)
class Load:
    prompt: int
    answer: int
    """Tokens of each request's prompt and answer."""
    requests: int
    concurrency: int
    """The most requests that clients have open."""
    cache_bytes: int
    seed: int = 0
    eager: bool = False

    def __post_init__(self) -> None:
        if min(self.prompt, self.requests, self.concurrency, self.cache_bytes, self.answer - 1) < 1:
            raise ValueError("prompt, requests, concurrency and cache bytes must be at least 1, the answer at least 2")
        if self.requests < self.concurrency:
            raise ValueError(f"{self.requests} requests are fewer than the {self.concurrency} that are to run at once")

    @property
    def max_len(self) -> int:
        # a prompt that is made of random tokens may be read as a few more
        return self.prompt + self.answer + 64


@dataclass(frozen=True)
class Found:
    """What one server did. Times are in seconds: the median and the 99th percentile."""

    cache: str
    tokens: int
    """Tokens that fit, as vLLM says at start-up."""
    in_flight: float
    tokens_per_second: float
    first: tuple[float, float]
    """To a request's first token."""
    step: tuple[float, float]
    """From a token to the next one."""
    preemptions: int
    hits: float
    """The share of prompts' tokens that the prefix cache had."""

    def document(self) -> dict[str, Any]:
        return {
            "cache": self.cache,
            "tokens": self.tokens,
            "in_flight": self.in_flight,
            "tokens_per_second": round(self.tokens_per_second, 3),
            "first_p50": self.first[0],
            "first_p99": self.first[1],
            "step_p50": self.step[0],
            "step_p99": self.step[1],
            "preemptions": self.preemptions,
            "hits": self.hits,
        }


def read_metrics(url: str) -> dict[str, float]:
    """The sums of all series of each name."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if match := re.match(r"(vllm:\w+)(?:\{.*\})? ([-+.\deE]+)$", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


@contextmanager
def in_flight(url: str) -> Iterator[list[float]]:
    """The numbers of running requests, read again and again; those before the first and after the last are left out."""
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            try:
                running = read_metrics(url).get(RUNNING, 0.0)
            except (OSError, HTTPException):
                continue
            if running:
                seen.append(running)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def load_command(url: str, model: Path, load: Load, out: Path) -> list[str]:
    where = ["--backend", "openai", "--base-url", url, "--model", "bench", "--tokenizer", str(model)]
    lengths = ["--random-input-len", str(load.prompt), "--random-output-len", str(load.answer), "--ignore-eos"]
    much = ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency), "--seed", str(load.seed)]
    times = ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"]
    kept = ["--save-result", "--result-dir", str(out.parent), "--result-filename", out.name]
    return [*vllm_command(), "bench", "serve", "--dataset-name", "random", *where, *lengths, *much, *times, *kept]


def server(model: Path, dtype: str, load: Load, log: Path, options: Mapping[str, Any] | None = None) -> Server:
    more = ["--kv-cache-memory-bytes", str(load.cache_bytes), "--max-num-seqs", str(load.concurrency)]
    more += ["--enforce-eager"] * load.eager
    # on a CPU this variable would count instead of the flag
    return with_cache(model, dtype, load.max_len, log, more, options, without=["VLLM_CPU_KVCACHE_SPACE"])


def measured(name: str, running: Server, model: Path, load: Load, folder: Path) -> Found:
    """Puts the load on a server that is ready. ServerError if a request failed."""
    out = folder / f"capacity-{name}.json"
    with watched(running):
        before = read_metrics(running.url)
        with in_flight(running.url) as seen:
            done = subprocess.run(load_command(running.url, model, load, out), capture_output=True, text=True)
        if done.returncode:
            raise ServerError(f"vllm bench serve exited with status {done.returncode}", done.stderr.splitlines()[-20:])
        after, said = read_metrics(running.url), json.loads(out.read_text(encoding="utf-8"))
        return judged(name, running.read_log(), load, said, {n: after[n] - before.get(n, 0.0) for n in after}, seen)


def judged(
    name: str, log: str, load: Load, said: Mapping[str, Any], counted: Mapping[str, float], seen: Sequence[float]
) -> Found:
    if said["completed"] != load.requests:
        raise ServerError(f"{said['completed']} of {load.requests} requests were answered by the server with {name}")
    if said["total_output_tokens"] != load.requests * load.answer:
        raise ServerError(
            f"the server with {name} returned {said['total_output_tokens']} tokens, not "
            f"{load.requests} times {load.answer}"
        )
    if not seen or (fits := FITS.search(log)) is None:
        raise ServerError(f"the server with {name} does not say what runs or what fits; vLLM's log has changed")
    return Found(
        name,
        int(fits[1].replace(",", "")),
        statistics.median(seen),
        said["output_throughput"],
        (said["p50_ttft_ms"] / 1e3, said["p99_ttft_ms"] / 1e3),
        (said["p50_tpot_ms"] / 1e3, said["p99_tpot_ms"] / 1e3),
        round(counted.get(PREEMPTIONS, 0.0)),
        counted.get(HITS, 0.0) / (counted.get(QUERIES) or 1.0),
    )


def rows(formats: Sequence[tuple[str, Mapping[str, Any]]], model: Path, load: Load, folder: Path) -> Iterator[Found]:
    """vLLM's own cache in 16 bits, then each format, as they are measured; the servers' logs go to `folder`."""
    caches = [(label(name, options), name, options) for name, options in formats if name != PLAIN]
    for name, dtype, options in [("bf16", PLAIN, {}), *caches]:
        with server(model, dtype, load, folder / f"capacity-{name}.log", options) as one:
            one.wait_until_healthy(START_SECONDS)
            yield measured(name, one, model, load, folder)

"""The command `python -m proof soak`: a real `vllm serve` under mixed load over HTTP.

    python -m proof soak --minutes 10 [--kv-cache-dtype squat2] [--clients 6] [--seed 0]

The clients mix completions and chats, short and long prompts, shared prefixes, streams, n > 1, stop strings, sampling,
and go away in the middle of an answer, in a cache so small that requests are preempted. Each answer is checked: its
choices, lengths, finish reasons and stop strings; under `lossless` and plain vLLM (`auto`) also that greedy prompts are
answered as before. The first third is warm-up; a straight line through the resident memory of all the server's
processes after that may rise by less than 2 %. At the end no request may be left and every KV block must be free.

Exits with 1 if any of that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from proof.soak.client import BadAnswer, place
from proof.soak.load import MAX_LEN, MODEL, VOCAB, Load, Order
from proof.soak.report import TOTAL, Report, Tally
from proof.soak.watch import Trend, metrics, tree_rss, trend
from vllm_kvq.bench.servers.server import Server, ServerError, free_port
from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.table import PLAIN

HOST = "127.0.0.1"
START_SECONDS = 600
DRAIN_SECONDS = 60
BLOCK = 64
POOL = 3.0
"""Requests of the maximum length that the cache holds."""
ERROR = re.compile(r"\bERROR\b|Traceback")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # oneDNN keeps up to 1024 compiled matrix products of vLLM's linear layers, one for each number of tokens in a step:
    # with or without us that fills for longer than a soak lasts, and a leak could hide behind it
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}
Samples = list[tuple[float, Counter[str]]]
"""Seconds, and bytes of each process."""
SHAPE = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": VOCAB}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kv-cache-dtype", choices=[*sorted(FORMATS), PLAIN], default="squat2", metavar="FORMAT")
    parser.add_argument("--clients", type=int, default=6, help="concurrent requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="start sooner: no compilation")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log")
    options = parser.parse_args(argv)
    if options.minutes <= 0 or options.clients < 1:
        parser.error("--minutes and --clients must be positive")
    # without this the server, which has its own process group, would outlive us
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="kvq-soak-") as folder:
            report = soak(Path(folder), options)
    except ServerError as error:
        print(*error.log_tail, f"soak: {error}", sep="\n", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    print(report.text())
    return int(bool(report.problems()))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def soak(folder: Path, options: argparse.Namespace) -> Report:
    from vllm_kvq.bench.models.random_model import random_model

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    model = str(random_model(folder / "model", **SHAPE))
    server = Server(model, _arguments(model, options), HOST, free_port(HOST), options.log or folder / "log")
    tally = Tally(repeats_are_equal=options.kv_cache_dtype in ("lossless", PLAIN))
    with server:
        server.wait_until_healthy(START_SECONDS)
        print(f"soak: {options.kv_cache_dtype}, {options.minutes:g} minutes, {options.clients} clients", flush=True)
        samples = _drive(server, tally, options)
        try:
            _drain(server.url)
            # the metrics are those of the last step: this one, with no other request running
            place(server.url, Order((20, 21), 1))
            final = metrics(server.url)
        except (OSError, HTTPException, BadAnswer) as error:
            tail = server.read_log().splitlines()[-20:]
            raise ServerError(f"the server does not answer after the last client: {error}", tail) from error
        # read before the server is stopped: its API process may see the engine end first, which it calls an error
        complaints = [line for line in server.read_log().splitlines() if ERROR.search(line)]
        status = server.stop()
    return Report(tally, trends(samples, 20 * options.minutes), final, complaints, status)


def _arguments(model: str, options: argparse.Namespace) -> list[str]:
    from proof.soak.pool import blocks_of

    cache = {
        "kv_cache_dtype": options.kv_cache_dtype,
        "block_size": BLOCK,
        "max_model_len": MAX_LEN,
        "dtype": "float32",
    }
    blocks = int(POOL * MAX_LEN / BLOCK) if options.kv_cache_dtype == PLAIN else blocks_of(model, POOL, cache)
    flags = {
        **cache,
        "served_model_name": MODEL,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
    }
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, *(["--enforce-eager"] if options.eager else [])]


def _drive(server: Server, tally: Tally, options: argparse.Namespace) -> Samples:
    """Load from all clients until time is up; the server's memory meanwhile."""
    begin = time.monotonic()
    end = begin + 60 * options.minutes

    def client(number: int) -> None:
        load = Load(options.seed, number)
        while time.monotonic() < end:
            order = load.draw()
            try:
                tally.answered(order, place(server.url, order))
            except Exception as error:
                tally.failed(error)
                time.sleep(0.5)

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(options.clients)]
    for thread in threads:
        thread.start()
    samples: Samples = []
    while (now := time.monotonic()) < end:
        samples.append((now - begin, tree_rss(server.pid)))
        time.sleep(min(2.0, options.minutes))
    for thread in threads:
        thread.join()
    return samples


def trends(samples: Samples, warm_up: float) -> dict[str, Trend]:
    """The trend of every process that was there all the time, and of all processes together."""
    names = sorted(set.intersection(*({*memory} for _, memory in samples)))
    lines = {name: trend([(t, memory[name]) for t, memory in samples], warm_up) for name in names}
    return {TOTAL: trend([(t, memory.total()) for t, memory in samples], warm_up)} | lines


def _drain(url: str) -> None:
    """Wait for requests whose client has left; if they stay, the report says so."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < deadline:
        now = metrics(url)
        if not now.running and not now.waiting:
            return
        time.sleep(0.5)

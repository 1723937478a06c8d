"""`vllm serve` with each format against `vllm serve` with a bf16 cache: time per token, tokens per second, first token.

    python -m vllm_kvq bench serve --formats kitty2 --context 1024 4096 16384 --batch 1 4

Rules:

  * The model has random weights and Llama-3.2-1B's shape (hidden 2048, 32 query and 8 KV heads of 64, MLP 8192), cut
    to `--layers` layers and a vocabulary of 4096 to fit a small machine; or `--model PATH`.
  * Both servers are up at once and take turns on the same prompts, over HTTP, streaming; a ratio is the median over
    turns of that turn's ratio.
  * After one prompt that isn't timed, the first `--cold` turns are cold, each on new prompts and started by the servers
    in turn: their time to the first token is the prefill. The later turns hit the prefix cache, and what is timed is
    decoding: from the first token to the last one, per token. Requests of a batch run at the same time.
  * `share`: the part of bf16's step at that context that the context causes, s = 1 - step(shortest) / step. `kernel`:
    the speedup r of only the attention kernel over vLLM's at that context, timed like `bench attention` before the
    servers start. `expected` is the resulting speedup of the step, 1 / (1 - s + s / r); the measured one is `ratio`. No
    cache could gain more than `at most`, 1 / (1 - s).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_kvq import console
from vllm_kvq.bench.names import add_formats
from vllm_kvq.bench.random_model import random_model
from vllm_kvq.bench.server import Server, ServerError, free_port
from vllm_kvq.bench.steps import VLLM_BLOCK, Shape, kvq_candidate, vllm_candidate
from vllm_kvq.bench.timing import compare

HOST = "127.0.0.1"
START_SECONDS = 600
SETTLE_SECONDS = 2.0
"""vLLM's workers poll for work for a second before they sleep, on a core that they share with the other server's."""
VOCAB = 4096
ARRIVALS, TRIES = 8, 5
"""A token's time is measured over at least ARRIVALS arrivals; a turn with fewer is repeated, up to TRIES times."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Turn:
    """Seconds to the first token and seconds per further token: for one request, or medians over a batch.

    A token's time is NaN if the server sent too many at once to measure it.
    """

    first: float
    step: float


def stream(url: str, prompt: list[int], tokens: int) -> Turn:
    """One request. A busy server sends several tokens at once, so tokens are counted, not messages."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=1800)
    begin = time.perf_counter()
    arrived: list[tuple[int, float]] = []
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ServerError(f"the server answered {answer.status}: {answer.read()[:300].decode(errors='replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                count = json.loads(line[6:])["usage"]["completion_tokens"]
                if count > (arrived[-1][0] if arrived else 0):
                    arrived.append((count, time.perf_counter()))
    finally:
        connection.close()
    if not arrived:
        raise ServerError("the server answered without a token")
    (first, start), (last, end) = arrived[0], arrived[-1]
    enough = len(arrived) >= min(tokens, ARRIVALS)
    return Turn(start - begin, (end - start) / (last - first) if enough else math.nan)


def take_turn(url: str, prompts: Prompts, tokens: int) -> Turn:
    """All prompts at once, each in its own thread, after the other server has gone to sleep."""
    time.sleep(SETTLE_SECONDS)
    results: list[Turn | Exception] = []

    def one(prompt: list[int]) -> None:
        try:
            results.append(stream(url, prompt, tokens))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done: list[Turn] = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        done.append(result)
    steps = [t.step for t in done]
    step = math.nan if any(map(math.isnan, steps)) else statistics.median(steps)
    return Turn(statistics.median(t.first for t in done), step)


def warm_turn(url: str, prompts: Prompts, tokens: int) -> Turn:
    """A turn, repeated as long as a token's time can't be measured."""
    for _ in range(TRIES):
        turn = take_turn(url, prompts, tokens)
        if not math.isnan(turn.step):
            return turn
    raise ServerError(f"{tokens} tokens arrive nearly at once, so a token's time can't be measured: raise --tokens")


@dataclass(frozen=True)
class Cell:
    """One context and batch, bf16 against one format."""

    context: int
    batch: int
    plain: Turn
    packed: Turn
    ratio: float
    first_ratio: float

    def text(self, share: float | None, kernel: float) -> str:
        line = (
            f"  {self.context:7} {self.batch:5}   {self.plain.step * 1e3:8.2f} {self.packed.step * 1e3:8.2f} "
            f"{self.ratio:6.2f}   {self.batch / self.plain.step:8.1f} {self.batch / self.packed.step:8.1f}   "
            f"{self.plain.first * 1e3:8.0f} {self.packed.first * 1e3:8.0f} {self.first_ratio:6.2f}"
        )
        if share is None:
            return f"{line}           {kernel:6.2f}"
        return f"{line}   {share:7.0%} {kernel:6.2f} {gain(share, kernel):8.2f} {1 / (1 - share):7.2f}"


HEADER = (
    "  context batch   ms/token          ratio   tokens/s            first token, cold (ms)    attention\n"
    "                      bf16   packed            bf16   packed       bf16   packed  ratio     share kernel expected"
    " at most"
)


def gain(share: float, kernel: float) -> float:
    """The speedup of a step when the `share` of it gets `kernel` times faster."""
    return 1 / (1 - share + share / kernel)


def model_shape(config: Any, context: int, batch: int) -> Shape:
    """The attention of one layer, from config.json; up to four layers' caches are rotated."""
    if not isinstance(config, dict):
        raise ValueError("it does not hold a model's configuration")

    def size(name: str) -> int:
        if type(value := config.get(name)) is not int or not 0 < value < 2**20:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        return value

    heads = size("num_attention_heads")
    head_size = size("head_dim") if config.get("head_dim") else size("hidden_size") // heads
    caches = min(size("num_hidden_layers"), 4)
    return Shape(context, batch, heads, size("num_key_value_heads"), head_size, VLLM_BLOCK, caches)


def kernel_ratio(name: str, model: Path, context: int, batch: int, rounds: int) -> float:
    """vLLM's time for the model's attention in bf16 divided by ours, for one layer, in this process."""
    path = model / "config.json"
    try:
        shape = model_shape(json.loads(path.read_text(encoding="utf-8")), context, batch)
    except (OSError, ValueError, RecursionError) as error:
        raise ServerError(f"{path}: {error}") from error
    candidates = {"bf16": vllm_candidate(shape, "auto"), name: kvq_candidate(shape, name)}
    return compare(candidates, rounds, 1.0)[1].ratio["bf16"]


def both(urls: tuple[str, str], prompts: Prompts, tokens: int, first: int) -> tuple[Turn, Turn]:
    """A turn of each server; `urls[first]` starts."""
    turns = {url: take_turn(url, prompts, tokens) for url in (urls[first], urls[1 - first])}
    return turns[urls[0]], turns[urls[1]]


def measure(urls: tuple[str, str], name: str, context: int, batch: int, args: argparse.Namespace) -> Cell:
    # all formats share the bf16 server: prompts that it answered for another format would not be cold
    cold = [both(urls, prompts_for(name, context, batch, i), args.tokens, i % 2) for i in range(args.cold)]
    prompts = prompts_for(name, context, batch, 0)
    turns = []
    for turn in range(args.rounds + 1):  # the first warms up
        plain, packed = (warm_turn(url, prompts, args.tokens) for url in urls)
        if turn:
            turns.append((plain, packed))
    middle = [
        Turn(statistics.median(pair[i].first for pair in cold), statistics.median(pair[i].step for pair in turns))
        for i in range(2)
    ]
    ratio = statistics.median(a.step / b.step for a, b in turns)
    first_ratio = statistics.median(a.first / b.first for a, b in cold)
    return Cell(context, batch, middle[0], middle[1], ratio, first_ratio)


def bench_model(folder: Path, layers: int, max_position: int) -> Path:
    path = folder / f"bench-model-{layers}-{max_position}"
    if not (path / "config.json").exists():
        print(f"writing a random model into {path}", file=sys.stderr, flush=True)
        random_model(
            path,
            hidden=2048,
            layers=layers,
            heads=32,
            kv_heads=8,
            head_dim=64,
            intermediate=8192,
            vocab=VOCAB,
            dtype="bfloat16",
            max_position=max_position,
        )
    return path


def server(model: Path, dtype: str, args: argparse.Namespace, max_len: int, log: Path) -> Server:
    options = ["--kv-cache-dtype", dtype, "--dtype", "bfloat16", "--served-model-name", "bench"]
    options += ["--max-model-len", str(max_len), "--max-num-seqs", str(max(args.batch))]
    return Server(str(model), options + ["--enforce-eager"] * args.eager, HOST, free_port(HOST), log)


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench serve",
        "`vllm serve` with each format against `vllm serve` with a bf16 cache: time per token, and to the first token.",
        ("", "--formats kitty2 --context 512 4096 16384 --layers 1 --eager", "--model ./checkpoint --batch 1 4 --json"),
        "a server failed; the end of its log says why",
    )
    add_formats(p)
    p.add_argument("--context", nargs="+", type=int, default=[512, 4096, 16384], help="prompt tokens per request")
    p.add_argument("--batch", nargs="+", type=int, default=[1])
    p.add_argument("--tokens", type=int, default=32, help="decoded tokens per request")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--cold", type=int, default=2, help="number of cold prompts, for the time to the first token")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--model", type=Path, help="checkpoint folder instead of the random model")
    p.add_argument("--eager", action="store_true", help="disable torch.compile")
    p.add_argument(
        "--folder", type=Path, default=Path(".demo"), help="folder for the random model and the servers' logs"
    )
    console.add_json(p)
    return p


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(arguments)
    if min(*args.context, *args.batch, args.rounds, args.cold, args.layers, args.tokens - 1) < 1:
        p.error("contexts, batches, rounds, cold turns and layers must be at least 1, tokens at least 2")
    if args.folder.exists() and not args.folder.is_dir():
        p.error(f"--folder {args.folder} is a file; name a folder")
    return args


def prompts_for(name: str, context: int, batch: int, turn: int) -> Prompts:
    rng = random.Random(f"{name} {context} {batch} {turn}")
    return [[rng.randrange(10, min(VOCAB, 500)) for _ in range(context)] for _ in range(batch)]


def against(
    name: str, model: Path, plain: Server, args: argparse.Namespace, max_len: int, kernels: dict[tuple[int, int], float]
) -> list[dict[str, Any]]:
    """Compares one format's server with bf16: the rows of the JSON document, printed as they come without --json."""
    rows: list[dict[str, Any]] = []
    packed = server(model, name, args, max_len, args.folder / f"bench-{name}.log")
    with packed:
        packed.wait_until_healthy(START_SECONDS)
        both((plain.url, packed.url), prompts_for(f"{name}, warm-up", min(args.context), 1, 0), args.tokens, 0)
        if not args.json:
            print(f"{name} against bf16\n{HEADER}", flush=True)
        for batch in sorted(set(args.batch)):
            shortest: float | None = None
            for context in sorted(set(args.context)):
                cell = measure((plain.url, packed.url), name, context, batch, args)
                share = None if shortest is None else max(0.0, 1 - shortest / cell.plain.step)
                shortest = shortest or cell.plain.step
                kernel = kernels[context, batch]
                rows.append({"format": name, **asdict(cell), "share": share, "kernel": kernel})
                if not args.json:
                    print(cell.text(share, kernel), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # for the servers to be stopped
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    max_len = max(args.context) + args.tokens + 128
    try:
        model = args.model or bench_model(args.folder, args.layers, max_len)
        cells = [(context, batch) for context in args.context for batch in args.batch]
        kernels = {
            name: {(c, b): kernel_ratio(name, model, c, b, 2 * args.rounds + 1) for c, b in cells}
            for name in args.formats
        }
        with server(model, "auto", args, max_len, args.folder / "bench-bf16.log") as plain:
            plain.wait_until_healthy(START_SECONDS)
            rows = [r for name in args.formats for r in against(name, model, plain, args, max_len, kernels[name])]
    except ServerError as error:
        print(*error.log_tail, f"bench serve: {error}", sep="\n", file=sys.stderr)
        return console.FOUND
    if args.json:
        console.show_json({"model": str(model), "rows": rows})
    return console.DONE


if __name__ == "__main__":
    sys.exit(main())

"""`vllm serve` with each format against `vllm serve` with a bf16 cache: time per token, tokens per second, first token.

Rules:

  * The model has random weights and Llama-3.2-1B's shape (hidden 2048, 32 query and 8 KV heads of 64, MLP 8192), cut
    to a few layers and a vocabulary of 4096 to fit a small machine; or it is a checkpoint of the user's.
  * Both servers are up at once and take turns on the same prompts, over HTTP, streaming; a ratio is the median over
    turns of that turn's ratio.
  * After one prompt that isn't timed, the first `cold` turns are cold, each on new prompts and started by the servers
    in turn: their time to the first token is the prefill. The later turns hit the prefix cache, and what is timed is
    decoding: from the first token to the last one, per token. Requests of a batch run at the same time.
  * `share`: the part of bf16's step at that context that the context causes, s = 1 - step(shortest) / step. `kernel`:
    the speedup r of only the attention kernel over vLLM's at that context, timed like `bench attention` before the
    servers start. `expected` is the resulting speedup of the step, 1 / (1 - s + s / r); the measured one is `ratio`. No
    cache could gain more than `at most`, 1 / (1 - s).
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_kvq.bench import vllm_build
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.bench.servers.server import START_SECONDS, Server, ServerError, vllm_command, watched, with_cache
from vllm_kvq.bench.steps import VLLM_BLOCK, Shape, bound_format, kvq_candidate, vllm_candidate
from vllm_kvq.bench.timing import compare
from vllm_kvq.formats.table import label
from vllm_kvq.integration.plan.memory import SPACE

SETTLE_SECONDS = 2.0
"""vLLM's workers poll for work for a second before they sleep, on a core that they share with the other server's."""
VOCAB = 4096
ARRIVALS, TRIES = 8, 5
"""A token's time is measured over at least ARRIVALS arrivals; a turn with fewer is repeated, up to TRIES times."""
Prompts = list[list[int]]
Formats = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Load:
    """What both servers are asked to do."""

    contexts: Sequence[int]
    """Prompt tokens per request."""
    batches: Sequence[int]
    tokens: int
    """Decoded tokens per request."""
    rounds: int
    cold: int
    """Cold prompts, for the time to the first token."""
    eager: bool = False

    def __post_init__(self) -> None:
        if min(*self.contexts, *self.batches, self.rounds, self.cold, self.tokens - 1) < 1:
            raise ValueError("contexts, batches, rounds and cold turns must be at least 1, tokens at least 2")

    @property
    def max_len(self) -> int:
        return max(self.contexts) + self.tokens + 128

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Each context with each batch."""
        return [(context, batch) for batch in sorted({*self.batches}) for context in sorted({*self.contexts})]


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
            if line.startswith(b"data: {") and (count := counted(line)) > (arrived[-1][0] if arrived else 0):
                arrived.append((count, time.perf_counter()))
    finally:
        connection.close()
    if not arrived:
        raise ServerError("the server answered without a token")
    (first, start), (last, end) = arrived[0], arrived[-1]
    if last < tokens:
        raise ServerError(f"the server's answer ended after {last} of {tokens} tokens")
    enough = len(arrived) >= min(tokens, ARRIVALS)
    return Turn(start - begin, (end - start) / (last - first) if enough else math.nan)


def counted(line: bytes) -> int:
    """The number of an answer's tokens so far, as one of its messages gives it."""
    try:
        return int(json.loads(line[6:])["usage"]["completion_tokens"])
    except (ValueError, LookupError, TypeError):
        # an engine that died, or half a message
        raise ServerError(f"the server answered: {line[6:306].decode(errors='replace').strip()}") from None


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


def gain(share: float, kernel: float) -> float:
    """The speedup of a step if a `share` of it becomes `kernel` times as fast."""
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


def checkpoint_shape(model: Path, context: int, batch: int) -> Shape:
    path = model / "config.json"
    try:
        return model_shape(json.loads(path.read_text(encoding="utf-8")), context, batch)
    except (OSError, ValueError, RecursionError) as error:
        raise ServerError(f"{path}: {error}") from error


def check(formats: Formats, model: Path, load: Load) -> None:
    """ServerError if the attention of this model can't be measured here, by vLLM's kernel or by ours."""
    vllm_command()  # refuses if there is no vLLM
    if why_not := vllm_build.why_not():
        raise ServerError(why_not)
    shape = checkpoint_shape(model, min(load.contexts), 1)
    if why_not := vllm_build.no_kernel(shape.head_size):
        raise ServerError(f"{model / 'config.json'}: {why_not}")
    for name, options in formats:
        try:
            bound_format(shape, name, options)
        except ValueError as error:
            raise ServerError(f"{label(name, options)} can't serve {model}: {error}") from error


def kernel_ratio(
    name: str, model: Path, context: int, batch: int, rounds: int, options: Mapping[str, Any] | None = None
) -> float:
    """vLLM's time for the model's attention in bf16 divided by ours, for one layer, in this process."""
    shape = checkpoint_shape(model, context, batch)
    candidates = {"bf16": vllm_candidate(shape, "auto"), name: kvq_candidate(shape, name, options)}
    return compare(candidates, rounds, 1.0)[1].ratio["bf16"]


def both(urls: tuple[str, str], prompts: Prompts, tokens: int, first: int) -> tuple[Turn, Turn]:
    """A turn of each server; `urls[first]` starts."""
    turns = {url: take_turn(url, prompts, tokens) for url in (urls[first], urls[1 - first])}
    return turns[urls[0]], turns[urls[1]]


def measure(urls: tuple[str, str], name: str, context: int, batch: int, load: Load) -> Cell:
    # all formats share the bf16 server: prompts that it answered for another format would not be cold
    cold = [both(urls, prompts_for(name, context, batch, i), load.tokens, i % 2) for i in range(load.cold)]
    prompts = prompts_for(name, context, batch, 0)
    turns = []
    for turn in range(load.rounds + 1):  # the first warms up
        plain, packed = (warm_turn(url, prompts, load.tokens) for url in urls)
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


def server(model: Path, dtype: str, load: Load, log: Path, options: Mapping[str, Any] | None = None) -> Server:
    more = ["--max-num-seqs", str(max(load.batches)), *["--enforce-eager"] * load.eager]
    return with_cache(model, dtype, load.max_len, log, more, options, defaults={SPACE: "2"})


def prompts_for(name: str, context: int, batch: int, turn: int) -> Prompts:
    rng = random.Random(f"{name} {context} {batch} {turn}")
    return [[rng.randrange(10, min(VOCAB, 500)) for _ in range(context)] for _ in range(batch)]


@dataclass(frozen=True)
class Row:
    """A cell of one format. `share` is None at the shortest context of a batch."""

    format: str
    cell: Cell
    share: float | None
    kernel: float

    def document(self) -> dict[str, Any]:
        return {"format": self.format, **asdict(self.cell), "share": self.share, "kernel": self.kernel}


Kernels = Mapping[tuple[int, int], float]
"""(context, batch) -> how many times as fast as vLLM's attention ours is."""


def against(
    name: str,
    model: Path,
    plain: Server,
    load: Load,
    kernels: Kernels,
    folder: Path,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """Compares one format's server with bf16's."""
    named = label(name, options or {})
    with server(model, name, load, folder / f"bench-{named}.log", options) as packed:
        packed.wait_until_healthy(START_SECONDS)
        with watched(plain, packed):
            both((plain.url, packed.url), prompts_for(f"{named}, warm-up", min(load.contexts), 1, 0), load.tokens, 0)
            shortest: dict[int, float] = {}
            for context, batch in load.shapes:
                cell = measure((plain.url, packed.url), named, context, batch, load)
                share = max(0.0, 1 - shortest[batch] / cell.plain.step) if batch in shortest else None
                shortest.setdefault(batch, cell.plain.step)
                yield Row(named, cell, share, kernels[context, batch])


def rows(formats: Formats, model: Path, load: Load, folder: Path) -> Iterator[Row]:
    """Each format against bf16, as it is measured; the servers' logs go to `folder`. ServerError if one fails."""
    check(formats, model, load)
    kernels = [
        {(c, b): kernel_ratio(name, model, c, b, 2 * load.rounds + 1, options) for c, b in load.shapes}
        for name, options in formats
    ]
    with server(model, "auto", load, folder / "bench-bf16.log") as plain:
        plain.wait_until_healthy(START_SECONDS)
        for (name, options), ratios in zip(formats, kernels, strict=True):
            yield from against(name, model, plain, load, ratios, folder, options)

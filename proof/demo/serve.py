"""`make run`: a vLLM server that keeps its KV cache in a low-bit format, and answers from it.

    python -m proof demo [--kv-cache-dtype FORMAT] [--port 8000] [--model PATH] [--once] [-- VLLM_ARGUMENTS]

Without --model it serves the demo model. Exit status 0 after an answer (--once) or Ctrl-C,
1 with one sentence otherwise, in particular if an answer is empty or wrong, or if the server does not report a packed
cache: a run that silently used a bf16 cache would prove nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proof.demo.capacity import Capacity, parse_capacity
from vllm_kvq.bench.servers.server import Server, ServerError
from vllm_kvq.eval.demo import demo_model
from vllm_kvq.eval.tasks.tasks import TASKS
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import PLAIN

HOST = "127.0.0.1"
DEMO_DIR = Path(".demo")
SERVED_NAME = "demo"
START_SECONDS = 600  # a large MODEL takes a while; the demo model is ready in well under a minute
HAYSTACK_SEED, HAYSTACK_CHARACTERS = 7, 8000
WORD, SENTENCE = 1, 12
"""Tokens of an answer: each word is a token of the demo model, which did not learn how sentences end."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(arguments)
    except ServerError as error:
        if error.log_tail:
            print(*error.log_tail, sep="\n", file=sys.stderr)
            print(f"\nrun: {error} (the whole log: {_log_path(arguments.port)})", file=sys.stderr)
        else:
            print(f"run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 0 if not arguments.once else 130


def run(arguments: argparse.Namespace) -> int:
    check_format(arguments.kv_cache_dtype)
    check_port(HOST, arguments.port)
    check_model(arguments.model)
    model = arguments.model or str(demo_model())
    options = ["--kv-cache-dtype", arguments.kv_cache_dtype, *arguments.vllm_arguments]
    if not arguments.model:
        # Eager mode: compiling takes longer than the rest of the demo.
        options += ["--served-model-name", SERVED_NAME, "--enforce-eager"]
    if Path(model).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    server = Server(model, options, HOST, arguments.port, _log_path(arguments.port))
    say(f"starting: {server.shown}")
    started = time.monotonic()
    with server:
        server.wait_until_healthy(START_SECONDS)
        say(f"the server is ready after {time.monotonic() - started:.0f} s; asking it what a long text says")
        capacity = parse_capacity(server.read_log())
        if capacity is None and arguments.kv_cache_dtype != PLAIN:
            raise ServerError(
                f"the server runs, but its log has no line `kvq: format={arguments.kv_cache_dtype} ...`, "
                "so the plugin did not take part"
            )
        ask(server.url, known_model=not arguments.model)
        if capacity is not None:
            say(str(capacity))
        if arguments.once:
            return _finish_once(server)
        how_to_go_on(server, arguments.kv_cache_dtype, capacity)
        server.wait()
    return 0


def _finish_once(server: Server) -> int:
    status = server.stop()
    if status != 0:
        raise ServerError(f"the server exited with status {status} when it was asked to stop")
    say("the server has stopped")
    return 0


def check_format(name: str) -> None:
    from vllm_kvq import FORMATS

    if name != PLAIN and name not in (*BUDGETS, *FORMATS):
        raise ServerError(f"there is no format {name!r}; the formats are {', '.join(shown_formats())}")


def shown_formats() -> list[str]:
    """Budgets first."""
    from vllm_kvq.formats.table import public_formats

    return [*BUDGETS, *(fmt.name for fmt in public_formats())]


def check_port(host: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ServerError(f"port {port} does not exist; choose one from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"port {port} can't be used ({error.strerror}); choose another one: make run PORT={port + 1}"
            ) from None


def check_model(model: str | None) -> None:
    looks_like_path = model is not None and model.startswith(("/", "."))
    if looks_like_path and not Path(str(model)).is_dir():
        raise ServerError(f"there is no folder {model} to load a model from")


@dataclass(frozen=True)
class Question:
    prompt: str
    shown: str
    expected: str


def questions() -> list[Question]:
    """Sentences hidden in a long text; the model is asked to complete each of them."""
    sample = TASKS["needles"].sample(random.Random(HAYSTACK_SEED), HAYSTACK_CHARACTERS)
    found = []
    for answer in sample.answers:
        prompt = sample.text[: answer.start]
        expected = sample.text[answer.start : answer.end].strip()
        found.append(Question(prompt, prompt[prompt.rfind("\n") + 1 :], expected))
    return found


def ask(url: str, known_model: bool) -> None:
    """With `known_model` a wrong answer is an error: it was trained to find them."""
    asked = questions()
    words = len(asked[0].prompt.split())
    print(f"\n{words:,} words of Python's documentation, with {len(asked)} sentences hidden among them.\n", flush=True)
    for question in asked:
        print(f"  {question.shown}", end="", flush=True)
        text = ""
        for piece in stream_answer(url, question.prompt, WORD if known_model else SENTENCE):
            print(piece, end="", flush=True)
            text += piece
        print(flush=True)
        if not text.strip():
            raise ServerError("the server's answer is empty")
        if known_model and question.expected not in text:
            raise ServerError(f"the answer is wrong: the sentence in the prompt ends with {question.expected!r}")
    print(flush=True)


def stream_answer(url: str, prompt: str, max_tokens: int) -> Iterator[str]:
    """Up to the end of the sentence."""
    import openai

    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
            model = client.models.list().data[0].id
            stream = client.completions.create(
                model=model, prompt=prompt, temperature=0, max_tokens=max_tokens, stop=["."], stream=True
            )
            for chunk in stream:
                if chunk.choices:
                    yield chunk.choices[0].text
    except openai.OpenAIError as error:
        raise ServerError(f"the server did not answer: {error}") from error


def how_to_go_on(server: Server, name: str, capacity: Capacity | None) -> None:
    from vllm_kvq.formats.table import suite

    others = [other for other in shown_formats() if other != name]
    file = f"configs/{capacity.format if capacity else suite('usual')[0]}.yaml"
    print(
        f"""
The server is listening on {server.url}; stop it with Ctrl-C. Its log is {server.log}.

  ask it     curl {server.url}/v1/completions -H 'Content-Type: application/json' -d \\
               '{{"prompt": "Add 7 5 9 3 8 step by step:\\n", "max_tokens": 42}}'
  formats    make run FORMAT={others[0]}     ({", ".join(others)}; FORMAT={PLAIN} is vLLM's own cache)
  a model    make run MODEL=path-or-name, or on a CPU
             .venv/bin/vllm serve MODEL --kv-cache-dtype {name} --kv-cache-memory-bytes 4G
  options    the same with --config {file} in place of --kv-cache-dtype
  more       README.md
""",
        flush=True,
    )


def say(text: str) -> None:
    print(f"run: {text}", flush=True)


def _log_path(port: int) -> Path:
    return DEMO_DIR / f"server-{port}.log"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof demo",
        description="Start a server with a low-bit KV cache and ask it a question.",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default=RECOMMENDED,
        metavar="FORMAT",
        help="format or budget, or auto, vLLM's own cache (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", help="model path or name (default: the demo model)")
    parser.add_argument("--once", action="store_true", help="stop the server after the answer")
    parser.add_argument("vllm_arguments", nargs="*", help="additional arguments of vllm serve, after --")
    return parser.parse_args(argv)

"""`vllm bench serve`, vLLM's own load generator: prompts of one length, and of lengths as people write them."""

from __future__ import annotations

import functools
import json
import random
import subprocess
from pathlib import Path
from typing import Any

from proof.clients.case import Case, Endpoint, Wrong
from vllm_kvq.bench.servers.server import vllm_command

REQUESTS = 16
ANSWER = 32
"""Tokens."""
RANDOM = ("--random-input-len", "512", "--random-output-len", str(ANSWER))
MINUTES = 20
WORDS = ("the", "river", "bridge", "town", "market", "old", "stone", "where", "people", "rain", "told", "stories")


def conversations(folder: Path) -> Path:
    """A file in ShareGPT's format. Lengths are spread as there: a median of a hundred words, some ten times as long."""
    rng = random.Random(0)

    def said(by: str) -> dict[str, str]:
        words = min(1200, max(8, round(rng.lognormvariate(4.6, 1.0))))
        return {"from": by, "value": " ".join(rng.choices(WORDS, k=words))}

    found = [{"id": str(i), "conversations": [said("human"), said("gpt")]} for i in range(4 * REQUESTS)]
    path = folder / "conversations.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def bench(kind: str, endpoint: Endpoint) -> str:
    of_kind = {
        "random": ("--dataset-name", "random", *RANDOM),
        "sharegpt": ("--dataset-name", "sharegpt", "--sharegpt-output-len", str(ANSWER)),
    }[kind]
    if kind == "sharegpt":
        of_kind += ("--dataset-path", str(conversations(endpoint.folder)))
    out = endpoint.folder / f"{kind}.json"
    server = ("--backend", "openai", "--base-url", endpoint.url, "--model", endpoint.model)
    load = ("--num-prompts", str(REQUESTS), "--seed", "0", "--ignore-eos", "--tokenizer", str(endpoint.checkpoint))
    result = ("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name)
    command = [*vllm_command(), "bench", "serve", *server, *of_kind, *load, *result]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
    if done.returncode:
        raise Wrong(f"it exited with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return judged(json.loads(out.read_text(encoding="utf-8")))


def judged(found: dict[str, Any]) -> str:
    if found["completed"] != REQUESTS or found.get("failed"):
        raise Wrong(f"{found['completed']} of {REQUESTS} requests were completed")
    if found["total_output_tokens"] != ANSWER * REQUESTS:
        raise Wrong(f"{found['total_output_tokens']} tokens came, where {ANSWER * REQUESTS} were asked for")
    return f"{found['completed']} requests, {found['total_input_tokens']} tokens in, {found['total_output_tokens']} out"


BENCH = (
    Case("vllm bench serve", "random prompts of 512 tokens", functools.partial(bench, "random")),
    Case("vllm bench serve", "conversations of ShareGPT's form", functools.partial(bench, "sharegpt")),
)

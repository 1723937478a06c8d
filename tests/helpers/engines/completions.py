"""A client of the completions endpoint that sends and receives tokens."""

from __future__ import annotations

import json
import urllib.request


def complete(url: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)["choices"][0]["token_ids"]

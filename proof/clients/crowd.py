"""Many streams at once, from one client."""

from __future__ import annotations

import asyncio
from collections import Counter

from openai import AsyncOpenAI

from proof.clients.case import SECONDS, Case, Endpoint, Wrong
from proof.clients.chats import user

STREAMS, TOKENS = 100, 32
SUBJECTS = ("rivers", "bridges", "clocks", "birds", "maps", "trains", "islands", "engines", "letters", "stars")


async def one(client: AsyncOpenAI, model: str, number: int) -> tuple[int, str]:
    """A stream's tokens and how it finished."""
    question = f"Question {number}: tell me about {SUBJECTS[number % len(SUBJECTS)]}."
    chunks = await client.chat.completions.create(
        model=model,
        messages=user(question),
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    tokens, reason = 0, ""
    async for chunk in chunks:
        if chunk.choices:
            reason = chunk.choices[0].finish_reason or reason
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return tokens, reason


async def every(endpoint: Endpoint) -> list[tuple[int, str]]:
    async with AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
        return await asyncio.gather(*(one(client, endpoint.model, i) for i in range(STREAMS)))


def crowd(endpoint: Endpoint) -> str:
    found = Counter(asyncio.run(every(endpoint)))
    if found != {(TOKENS, "length"): STREAMS}:
        raise Wrong(f"not all of {STREAMS} streams have {TOKENS} tokens: {dict(found)}")
    return f"{STREAMS} times {TOKENS} tokens"


CROWD = (Case("openai, asynchronous", f"{STREAMS} streams at once", crowd),)

"""The `openai` package: what its users do, asked of a model that knows a little."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

from openai import BadRequestError
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from proof.clients.case import Case, Endpoint, Wrong

CAPITAL = "What is the capital of France? Answer in one sentence."
CITY = "Paris"
LONGEST = 48
CODE, PASSAGES = "7412", 220
"""The number that is hidden in a long prompt, a third of the way in, and how many other sentences that prompt has."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def ask(endpoint: Endpoint, text: str = CAPITAL, **more: Any) -> ChatCompletion:
    """Greedy unless told otherwise."""
    settings: dict[str, Any] = {"model": endpoint.model, "max_tokens": LONGEST, "temperature": 0, **more}
    answer: ChatCompletion = endpoint.client.chat.completions.create(messages=user(text), **settings)
    return answer


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def must(right: bool, sentence: str) -> None:
    if not right:
        raise Wrong(sentence)


def capital(endpoint: Endpoint) -> str:
    names = [model.id for model in endpoint.client.models.list()]
    must(endpoint.model in names, f"{endpoint.model} is not among the models {names}")
    answer = ask(endpoint)
    said, usage = text_of(answer), answer.usage
    must(CITY in said, f"asked for the capital of France, it said {said!r}")
    must(usage is not None, "the answer has no usage")
    assert usage is not None
    must(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"the tokens do not add up: {usage}")
    return f"{said.strip()!r}"


def streamed(endpoint: Endpoint) -> str:
    whole = text_of(ask(endpoint))
    chunks = endpoint.client.chat.completions.create(
        model=endpoint.model, messages=user(CAPITAL), max_tokens=LONGEST, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    joined = "".join(pieces)
    must(joined == whole, f"streamed, it says {joined!r}; at once {whole!r}")
    return f"{sum(map(bool, pieces))} pieces, together the same text"


def probabilities(endpoint: Endpoint) -> str:
    answer = ask(endpoint, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    tokens = (logprobs and logprobs.content) or []
    must(bool(tokens), "the answer has no logprobs")
    for token in tokens:
        top = [other.logprob for other in token.top_logprobs]
        must(all(map(math.isfinite, [token.logprob, *top])), f"{token.token!r} has a logprob that is not finite")
        must(token.logprob >= max(top) - 1e-6, f"{token.token!r} was chosen, but is not the most probable")
    return f"{len(tokens)} tokens, each the most probable one"


def samples(endpoint: Endpoint) -> str:
    """Twice with one seed."""
    story = "Tell me the first sentence of a story about a lighthouse."
    twice = [ask(endpoint, story, n=3, seed=7, temperature=1.0, max_tokens=24) for _ in range(2)]
    first, again = ([choice.message.content for choice in answer.choices] for answer in twice)
    must(len(set(first)) == 3, f"three samples are not different: {first}")
    must(first == again, "the same seed gave other samples")
    return "3 different answers, the same again"


def stopped(endpoint: Endpoint) -> str:
    answer = ask(endpoint, "Count from 1 to 9, separated by commas, without any other words.", stop=["5"])
    said, reason = text_of(answer), answer.choices[0].finish_reason
    must("5" not in said and reason == "stop", f"told to stop at 5, it said {said!r} and finished by {reason!r}")
    return f"{said.strip()!r}"


def long_prompt() -> str:
    rooms = itertools.cycle(("kitchen", "library", "workshop", "garden", "attic", "cellar", "hall"))
    sentences = [f"On day {i} the {next(rooms)} was cleaned and everything was put back." for i in range(PASSAGES)]
    sentences.insert(PASSAGES // 3, f"The code of the safe is {CODE}; nobody else may know it.")
    return " ".join(sentences) + "\n\nWhat is the code of the safe? Answer with the number only."


def prefix_hit(endpoint: Endpoint) -> str:
    """A long prompt, most of which is read from packed pages, and again from the prefix cache."""
    replica = {"X-data-parallel-rank": "0"}  # each has a prefix cache of its own
    cold, hit = (ask(endpoint, long_prompt(), extra_headers=replica) for _ in range(2))
    cached = []
    for answer in (cold, hit):
        said, details = text_of(answer), answer.usage and answer.usage.prompt_tokens_details
        must(CODE in said, f"it did not find {CODE}: {said!r}")
        cached.append((details and details.cached_tokens) or 0)
    assert hit.usage is not None
    tokens = hit.usage.prompt_tokens
    must(cached[1] >= tokens // 2, f"{cached[1]} of {tokens} tokens came from the prefix cache")
    return f"{tokens} tokens, {cached[1]} of them from the cache"


def structured(endpoint: Endpoint) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    said = text_of(ask(endpoint, "Describe the capital of France.", response_format=form))
    try:
        found = json.loads(said)
    except ValueError as error:
        raise Wrong(f"the answer is not JSON: {said!r}") from error
    right = found.keys() == SCHEMA["properties"].keys() and isinstance(found["inhabitants"], int)  # type: ignore[attr-defined]
    must(right, f"the answer does not have the form asked for: {said}")
    choice = text_of(ask(endpoint, extra_body={"structured_outputs": {"choice": ["Lyon", "Paris"]}}))
    must(choice in ("Lyon", "Paris"), f"told to choose Lyon or Paris, it said {choice!r}")
    return f"{json.dumps(found)}; {choice}"


def refused(endpoint: Endpoint) -> str:
    """What is too long is refused in a sentence, and the next request is answered."""
    try:
        ask(endpoint, "word " * 100_000)
    except BadRequestError as error:
        sentence = str(error)
    else:
        raise Wrong("a prompt of 100,000 words was not refused")
    must("context length" in sentence or "max_model_len" in sentence, f"the refusal does not say why: {sentence}")
    capital(endpoint)
    return "400, and it goes on"


CHATS = (
    Case("openai", "models, a chat, usage", capital),
    Case("openai", "a stream", streamed),
    Case("openai", "log probabilities", probabilities),
    Case("openai", "n=3 with a seed, twice", samples),
    Case("openai", "a stop string", stopped),
    Case("openai", "a long prompt, twice: prefix hits", prefix_hit),
    Case("openai", "JSON schema, and a choice", structured),
    Case("openai", "a prompt that is too long", refused),
)
SHORT = tuple(case for case in CHATS if case.run in (capital, streamed, prefix_hit, structured))
"""For servers that differ in what runs behind the endpoint."""

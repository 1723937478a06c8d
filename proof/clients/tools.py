"""Tools: called because they must be, and in Qwen2.5's own format, which the checkpoint's chat template shows the
model and vLLM's `hermes` parser reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from openai.types.chat import ChatCompletionToolParam

from proof.clients.case import Case, Endpoint, Wrong
from proof.clients.chats import CITY, LONGEST, ask, must, text_of, user

QUESTION = f"What is the weather in {CITY} now?"
NAME = "get_weather"
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
REPLY = '{"weather": "snow", "celsius": -3}'
BEGIN, END = "<tool_call>\n", "\n</tool_call>"
OWN = {"regex": BEGIN + r'\{"name": "[a-z_]+", "arguments": \{"city": "[A-Za-z ]+"\}\}' + END}
"""Qwen2.5's format. The small Coder models write the JSON without the tags, which they are therefore held to."""


def _city(answers: Iterable[Any], how: str) -> str:
    """The city for which the weather is asked."""
    called = list(answers)
    must(len(called) == 1, f"{how}: {len(called)} tools were called")
    function = called[0].function
    must(function.name == NAME, f"{how}: it called {function.name!r}")
    return _argument(function.arguments, how)


def _argument(arguments: str, how: str) -> str:
    try:
        city = json.loads(arguments)["city"]
    except (ValueError, KeyError, TypeError) as error:
        raise Wrong(f"{how}: the arguments are {arguments!r}") from error
    must(CITY in city, f"{how}: it asked for the weather in {city!r}")
    return str(city)


def _streamed(endpoint: Endpoint, **more: Any) -> tuple[str, str, str]:
    """The text, the names and the arguments of the calls, each put together from its pieces."""
    settings: dict[str, Any] = {"model": endpoint.model, "max_tokens": LONGEST, "temperature": 0, **more}
    pieces = endpoint.client.chat.completions.create(messages=user(QUESTION), tools=[WEATHER], stream=True, **settings)
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    functions = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
    text = "".join(delta.content or "" for delta in deltas)
    return text, "".join(f.name or "" for f in functions), "".join(f.arguments or "" for f in functions)


def _conversation(arguments: str) -> list[Any]:
    """The question, the call, and what the tool replied."""
    call = {"id": "1", "type": "function", "function": {"name": NAME, "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*user(QUESTION), asked, {"role": "tool", "tool_call_id": "1", "content": REPLY}]


def required(endpoint: Endpoint) -> str:
    """Called because it must be, and streamed; what comes back is used."""
    answer = ask(endpoint, QUESTION, tools=[WEATHER], tool_choice="required")
    city = _city(answer.choices[0].message.tool_calls or (), "required")
    _, _, written = _streamed(endpoint, tool_choice={"type": "function", "function": {"name": NAME}})
    _argument(written, "streamed")
    last = endpoint.client.chat.completions.create(
        model=endpoint.model, messages=_conversation(written), tools=[WEATHER], max_tokens=LONGEST, temperature=0
    )
    said = text_of(last)
    must("snow" in said or "-3" in said, f"told that it snows, it said {said!r}")
    return f"{NAME}({city!r}), then {said.strip()!r}"


def _rendered(endpoint: Endpoint, messages: list[Any]) -> str:
    """The prompt that the server makes of a conversation with tools."""

    def post(what: str, **body: Any) -> Any:
        return endpoint.client.post(f"{endpoint.url}/{what}", cast_to=object, body={"model": endpoint.model, **body})

    tokens = post("tokenize", messages=messages, tools=[WEATHER])["tokens"]
    return str(post("detokenize", tokens=tokens)["prompt"])


def own(endpoint: Endpoint) -> str:
    """The template shows the model tools, calls and replies in tags; what it writes in them is read as a call."""
    form = {"structured_outputs": OWN}
    written = text_of(ask(endpoint, QUESTION, tools=[WEATHER], tool_choice="none", extra_body=form)).strip()
    must(written.startswith(BEGIN) and written.endswith(END), f"it did not write a call in tags: {written!r}")
    first = ask(endpoint, QUESTION, tools=[WEATHER], extra_body=form).choices[0]
    city = _city(first.message.tool_calls or (), "read by the parser")
    must(first.finish_reason == "tool_calls", f"a call finished by {first.finish_reason!r}")
    must(not first.message.content, f"next to the call it said {first.message.content!r}")
    text, name, arguments = _streamed(endpoint, extra_body=form)
    must(not text.strip() and name == NAME, f"streamed, it called {name!r} and said {text!r}")
    _argument(arguments, "streamed")
    prompt = _rendered(endpoint, _conversation(arguments))
    for part in (f"<tools>\n{json.dumps(WEATHER)}\n</tools>", written, f"<tool_response>\n{REPLY}\n</tool_response>"):
        must(part in prompt, f"the prompt lacks {part!r}: {prompt!r}")
    return f"{' '.join(written.split())} is {NAME}({city!r})"


TOOLS = (
    Case("openai", "tools: required, streamed, answered", required),
    Case("openai", "tools in Qwen2.5's own format", own),
)

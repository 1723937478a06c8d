"""Options are data: whatever JSON says, the answer is a bound format or one sentence, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvq.formats import FORMATS, Geometry, PageFormat
from vllm_kvq.formats.settings import Settings
from vllm_kvq.formats.table import declared_options, key_codecs, value_codecs

HOSTILE = [
    "__class__",
    "__import__('os').system('true')",
    "${HOME}",
    "../../etc",
    "a\nb",
    "\0",
    "lam",
    "0x20",
    "🦜",
    "",
]
TEXT = st.text(max_size=20) | st.sampled_from(HOSTILE)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | TEXT
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=9), x, max_size=4), max_leaves=12
)
CODECS = {"keys": key_codecs(), "values": value_codecs()}
NAMES = st.sampled_from([*(option.name for option, _ in declared_options()), *HOSTILE]) | st.text(max_size=12)


def answer(make: Callable[[], Any]) -> Any:
    """The bound format, or the refusal as text."""
    try:
        return make()
    except ValueError as error:
        return str(error)


def one_sentence(text: Any) -> bool:
    return isinstance(text, str) and text != "" and "\n" not in text


@settings(max_examples=300)
@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(NAMES, JSON, max_size=4))
def test_any_object_of_options(name: str, options: dict[str, Any]) -> None:
    options = json.loads(json.dumps(options))
    got = answer(lambda: FORMATS[name].bind(Geometry(64, 64), options))
    assert isinstance(got, PageFormat) or one_sentence(got)


@settings(max_examples=100)
@given(JSON)
def test_anything_in_the_place_of_the_object(value: Any) -> None:
    from vllm_kvq.integration.plan.options import Options

    cache = SimpleNamespace(cache_dtype="squat2")
    got = answer(lambda: Options.of(SimpleNamespace(additional_config={"kvq": value}, cache_config=cache)))
    assert isinstance(got, Options) or one_sentence(got)


ODD = JSON | st.binary(max_size=9) | st.dates() | st.complex_numbers() | st.tuples(JSON) | st.frozensets(SCALARS)
KEYS = NAMES | SCALARS | st.binary(max_size=3)


@settings(max_examples=200)
@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(KEYS, ODD, max_size=3))
def test_any_object_of_python(name: str, options: dict[Any, Any]) -> None:
    """`LLM(additional_config=...)` accepts more than JSON. What is accepted can be bound."""
    from vllm_kvq.integration.plan.options import Options

    config = SimpleNamespace(additional_config={"kvq": options}, cache_config=SimpleNamespace(cache_dtype=name))
    got = answer(lambda: Options.of(config))
    if isinstance(got, Options):
        got = answer(lambda: got.bind(Geometry(64, 64)))
    assert isinstance(got, PageFormat) or one_sentence(got)


@given(st.sampled_from(sorted(FORMATS)), JSON)
def test_any_name_of_a_codec(name: str, value: Any) -> None:
    for half in ("keys", "values"):
        got = answer(lambda: FORMATS[name].settings({half: value}))  # noqa: B023
        assert isinstance(got, Settings) == (isinstance(value, str) and value in CODECS[half])
        assert isinstance(got, Settings) or one_sentence(got)
